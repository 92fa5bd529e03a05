"""The order in which kernels' programs run where one follows the other: any but that of their numbers, as a GPU may choose.

It is always the same for a number of programs, because processes whose programs wait for each other must agree.
"""

import numpy as np


def order_of(num_programs: int) -> list[int]:
    order = np.random.default_rng(num_programs).permutation(num_programs).tolist()
    return order if order != sorted(order) else order[::-1]


def permute_interpreted_programs() -> None:
    """Let Triton's interpreter take that order, in this process, along the first axis of a grid."""
    from triton.runtime.interpreter import interpreter_builder

    set_dim, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    order: list[int] = []

    def set_grid_dim(nx: int, ny: int, nz: int) -> None:
        order[:] = order_of(nx)
        set_dim(nx, ny, nz)

    interpreter_builder.set_grid_dim = set_grid_dim
    interpreter_builder.set_grid_idx = lambda x, y, z: set_index(order[x], y, z)
