"""A program that prints the level of the kernels that it loads, after a product with them."""

PRODUCT = """
import torch
from tightwire.kernels.cpu.library import level
from tightwire.kernels.linear import linear
torch.manual_seed(0)
x, weight = torch.randn(3, 64), torch.randn(5, 64)
assert torch.allclose(linear(x, weight), x @ weight.T, atol=1e-4)
print(level())
"""
