"""Thousands of AllReduces whose algorithm, shape, dtype and values change from call to call, each result checked."""

import random
import time

import torch

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group

ALGORITHMS = ("one-shot", "two-shot", "auto") * 6 + ("ring", "flash:none,none")
# Around a vector, a block, a slice of each rank, and several chunks of 256 KiB now and then.
LENGTHS = (1, 16, 63, 288, 577, 4096) * 8 + (150_000,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_VALUES = 7  # a buffer read a turn too early or too late holds another value


def alternating_calls(group: Group, num_calls: int, seed: int) -> float:
    """Seconds that ``num_calls`` took. All ranks draw the same calls from ``seed``; now and then one is late.

    Small integers are exact in every dtype, so a result is right or wrong to the bit.
    """
    rng, world_size = random.Random(seed), group.world_size
    arms = {name: make_all_reduce(name, group) for name in set(ALGORITHMS)}
    shapes = [(length, dtype) for length in set(LENGTHS) for dtype in DTYPES]
    inputs = {
        (*shape, value): torch.full((shape[0],), value * (group.rank + 1), dtype=shape[1])
        for shape in shapes
        for value in range(NUM_VALUES)
    }
    total = world_size * (world_size + 1) // 2
    wanted = {key: torch.full((key[0],), key[2] * total, dtype=key[1]) for key in inputs}
    start = time.monotonic()
    for call in range(num_calls):
        name, key = rng.choice(ALGORITHMS), (rng.choice(LENGTHS), rng.choice(DTYPES), call % NUM_VALUES)
        if rng.random() < 1e-3 and group.rank == call % world_size:
            time.sleep(1e-3)
        result = arms[name](inputs[key])
        if not torch.equal(result, wanted[key]):
            raise AssertionError(f"call {call}, {name} of {key}: {result.unique().tolist()[:5]}")
    return time.monotonic() - start
