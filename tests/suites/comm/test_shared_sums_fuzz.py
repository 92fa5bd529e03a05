"""Sums and gathers over shared memory between processes, with random lengths, dtypes, chunks and delays: to the bit.

``TIGHTWIRE_FUZZ_CASES=300 pytest tests/suites/comm/test_shared_sums_fuzz.py`` draws more; `make sanitize` runs it too.
"""

import random
import time

import pytest
import torch
from harness import Ranks
from helpers.fuzz import fuzz_seeds
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.transport.segment import why_unusable

pytestmark = pytest.mark.skipif(why_unusable() is not None, reason=str(why_unusable()))

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_CALLS, _MAX_CHUNKS = 50, 30


def _inputs(call: int, world_size: int, chunk_bytes: int, draw: random.Random) -> list[Tensor]:
    """Each rank's tensor, the same list on every rank: of any alignment that its dtype allows, of very unlike sizes."""
    num_elems = draw.choice((1, 15, 64, 65, draw.randint(1, 700), draw.randint(1, _MAX_CHUNKS * chunk_bytes // 4)))
    dtype, offset = draw.choice(_DTYPES), draw.choice((0, 0, 1, 7))
    generator = torch.Generator().manual_seed(call)
    scale_R1 = torch.exp2(torch.randint(-8, 8, (world_size, 1), generator=generator).float())
    numbers_RN = torch.randn(world_size, offset + num_elems, generator=generator) * scale_R1
    return [numbers_N.to(dtype)[offset:] for numbers_N in numbers_RN]


def _make_calls(group: Group, seed: int, chunk_bytes: int) -> None:
    """The same calls on all ranks, each rank late for some of them."""
    draw, own = random.Random(seed), random.Random(seed * 100 + group.rank)
    algorithms = {name: make_all_reduce(name, group) for name in ("one-shot", "two-shot", "auto")}
    for call in range(_NUM_CALLS):
        name = draw.choice(sorted(algorithms))
        inputs = _inputs(seed * _NUM_CALLS + call, group.world_size, chunk_bytes, draw)
        given = inputs[group.rank].clone() if draw.random() < 0.5 else inputs[group.rank]
        if own.random() < 0.1:
            time.sleep(own.choice((1e-5, 1e-3, 5e-3)))
        got = algorithms[name](given)
        want = inputs[0].float()
        for other in inputs[1:]:
            want = want + other.float()
        about = f"call {call} of seed {seed}: {name} of {len(given)} {given.dtype}"
        assert torch.equal(got.view(torch.uint8), want.to(given.dtype).view(torch.uint8)), about
        assert torch.equal(given, inputs[group.rank]), about
        if draw.random() < 0.1:
            group.transport.barrier()
            told = group.transport.gather(given.view(torch.uint8))
            assert all(torch.equal(buf, other.view(torch.uint8)) for buf, other in zip(told, inputs, strict=True)), (
                about
            )


@pytest.mark.parametrize("seed", fuzz_seeds(6))
def test_sums_are_those_in_rank_order(seed: int) -> None:
    draw = random.Random(seed)
    world_size, chunk_bytes = 2 + seed % 3, 64 * draw.choice((1, 2, 5, draw.randint(1, 100), 512))
    with Ranks(world_size, shared_memory=True, chunk_bytes=chunk_bytes, collective_timeout_s=60.0) as ranks:
        ranks.run(_make_calls, seed, chunk_bytes, timeout_s=120)
