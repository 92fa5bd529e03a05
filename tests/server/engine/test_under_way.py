"""Chunks leave the last stage in their order, unless their sequence was preempted or has ended meanwhile."""

from dataclasses import replace

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.config.limits import Limits
from tightwire.server.engine.request import Request, make_request
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.engine.under_way import ChunksUnderWay
from tightwire.server.ipc.messages import AddRequest


def _under_way(num_stages: int) -> ChunksUnderWay:
    limits = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=64, block_size=4)
    return ChunksUnderWay(replace(limits, num_stages=num_stages))


def _request(num_tokens: int, blocks: list[int]) -> Request:
    request = make_request(AddRequest("r", list(range(1, num_tokens + 1)), SamplingParams(max_tokens=8)), (), 0.0)
    request.blocks.extend(blocks)
    return request


def _chunk(request: Request, start: int, end: int, samples: bool = False) -> Chunk:
    return Chunk(request, start, end, range(0), samples)


def test_a_chunk_leaves_after_it_has_passed_all_stages() -> None:
    under_way, request = _under_way(3), _request(20, [5, 6, 7, 8, 9])
    chunks = [_chunk(request, 0, 12), _chunk(request, 12, 20, samples=True)]
    steps = [under_way.advance(1, chunks[:1], staged=True), under_way.advance(2, chunks[1:], staged=True)]
    assert under_way and (request.entered_at, request.ready_at) == (2, 5)
    steps += [under_way.advance(index, [], staged=True) for index in (3, 4)]
    assert [step.leaving for step in steps] == [[], [], [(chunks[0], 0)], [(chunks[1], 0)]]
    assert not under_way and all(step.num_together == 0 for step in steps)
    request.token_ids.append(7)
    assert under_way.advance(5, [_chunk(request, 20, 21, samples=True)], staged=True).awaits == 2


def test_blocks_that_others_write_are_named_until_the_chunk_is_in_the_cache() -> None:
    under_way, ended, other = _under_way(2), _request(8, [1, 2]), _request(3, [2, 3])
    under_way.advance(1, [_chunk(ended, 0, 8)], staged=True)
    ended.epoch += 1  # its blocks are free
    assert not under_way
    step = under_way.advance(2, [_chunk(other, 3, 4, samples=True)], staged=True)
    assert (step.leaving, step.rewritten, step.num_together) == ([], [2], 1)
    other.entered_at = 1  # its decode rows wait for step 1's chunks, so these write nothing later
    assert under_way.advance(3, [_chunk(other, 3, 4, samples=True)], staged=True).rewritten == []


def test_all_ranks_compute_other_prompts_together() -> None:
    under_way, request = _under_way(2), _request(8, [1, 2])
    step = under_way.advance(1, [_chunk(request, 0, 8, samples=True)], staged=False)
    assert step.num_together == 1 and not under_way and request.entered_at == 0
