"""The rows of ``tools/activation_sites.py`` name the products that they say, and each product of a layer once by site and by layer."""

import re
from itertools import chain

from activation_sites import SITES, products

NAMES = [
    f"model.layers.{layer}.{name}.weight"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


def test_rows_name_their_products() -> None:
    found = {row: [name for name in NAMES if re.search(pattern, name)] for row, pattern in products(12).items()}
    assert found.pop("none, the default") == [] and found.pop("all") == NAMES
    assert sorted(chain.from_iterable(found.pop(site) for site in SITES)) == sorted(NAMES)
    assert found["layer 1"] == NAMES[7:14] and [*chain.from_iterable(found.values())] == NAMES
