"""The self-test finds each kind of broken algorithm, on all ranks alike, and passes every sound one; its messages have a known sum."""

import re
from collections.abc import Callable

import pytest
import torch
from harness import run_in_process, run_ranks
from torch import Tensor

from tightwire.comm.all_reduce.entry import SelfTestVerdict
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import all_reduce_names
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.self_test import KnownSum, agree, self_test
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.errors import PeerLostError
from tightwire.comm.group.group import Group, in_process_groups

Break = Callable[[Group, Tensor, Tensor], Tensor]


class BrokenAllReduce(OneShotAllReduce):
    """One-shot, then ``break_it(group, x, result)``."""

    name = "broken"

    def __init__(self, group: Group, break_it: Break) -> None:
        super().__init__(group)
        self._group, self._break = group, break_it

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        return self._break(self._group, x, super().__call__(x, phase, site))


def off_by_a_little(group: Group, x: Tensor, result: Tensor) -> Tensor:
    result[-1] += 0.1
    return result


def not_a_number(group: Group, x: Tensor, result: Tensor) -> Tensor:
    result[0] = torch.nan
    return result


def other_bits_on_the_last_rank(group: Group, x: Tensor, result: Tensor) -> Tensor:
    if group.rank == group.world_size - 1:
        result[result == 0] = -0.0
        result[0] = torch.nextafter(result[0], torch.tensor(torch.inf))
    return result


def other_input(group: Group, x: Tensor, result: Tensor) -> Tensor:
    x.zero_()
    return result


def other_shape(group: Group, x: Tensor, result: Tensor) -> Tensor:
    return result[:-1]


def more_bytes(group: Group, x: Tensor, result: Tensor) -> Tensor:
    group.transport.gather(torch.zeros(8, dtype=torch.uint8))
    return result


def wrong_only_when_large(group: Group, x: Tensor, result: Tensor) -> Tensor:
    return result if x.numel() == 64 else result.neg()


def raises(group: Group, x: Tensor, result: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


def loses_a_peer(group: Group, x: Tensor, result: Tensor) -> Tensor:
    raise PeerLostError("rank 1 is gone", [1])


def _check(group: Group, break_it: Break) -> list[SelfTestVerdict]:
    arms = {"broken": BrokenAllReduce(group, break_it), "one-shot": OneShotAllReduce(group)}
    return self_test(group, arms, row_elems=64, max_rows=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (off_by_a_little, "rank 0: 256 B: 1 of 64 sums exceed the error bound, the largest error is 0.1"),
        (not_a_number, "rank 0: 256 B: 1 of 64 sums exceed"),
        (other_bits_on_the_last_rank, "ranks 0 and 2 have different bits"),
        (other_input, "rank 0: 256 B: changed its input"),
        (other_shape, "rank 0: 256 B: gave (63,)"),
        (more_bytes, "rank 0: 256 B: sent 528 B, expected 512"),
        (wrong_only_when_large, "rank 0: 2048 B: "),
        (raises, "rank 0: raised RuntimeError: no such kernel"),
    ],
)
def test_a_broken_algorithm_is_found_by_all_ranks_and_the_others_pass(break_it: Break, found: str) -> None:
    verdicts = run_in_process(3, _check, break_it)
    assert verdicts[0] == verdicts[1] == verdicts[2]
    broken, sound = verdicts[0]
    assert (broken.algorithm, broken.ok, sound.algorithm, sound.ok) == ("broken", False, "one-shot", True)
    assert broken.detail.startswith(found), broken.detail


def test_a_lost_peer_is_no_verdict_but_the_end_of_the_group() -> None:
    with pytest.raises(PeerLostError):
        run_in_process(2, _check, loses_a_peer)


def _check_all(group: Group, dtype: torch.dtype, row_elems: int) -> list[SelfTestVerdict]:
    arms = {name: make_all_reduce(name, group) for name in all_reduce_names()}
    return self_test(group, arms, row_elems=row_elems, max_rows=20, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("row_elems", [1, 72, 576])
def test_every_algorithm_passes(dtype: torch.dtype, row_elems: int) -> None:
    verdicts = run_in_process(3, _check_all, dtype, row_elems)[0]
    assert [verdict.algorithm for verdict in verdicts if not verdict.ok] == []
    assert f"{row_elems * dtype.itemsize} B and {20 * row_elems * dtype.itemsize} B" in verdicts[0].detail


def test_every_algorithm_passes_between_processes() -> None:
    for verdicts in run_ranks(2, _check_all, torch.bfloat16, 576, shared_memory=True):
        assert [verdict.algorithm for verdict in verdicts if not verdict.ok] == []


def _check_large(group: Group) -> list[SelfTestVerdict]:
    arms = {"one-shot": OneShotAllReduce(group)}
    return self_test(group, arms, row_elems=4096, max_rows=2048, dtype=torch.bfloat16)


def test_the_largest_message_is_checked_whole_and_the_verdict_says_what_it_was_made_of() -> None:
    (verdict,) = run_in_process(2, _check_large)[0]
    assert verdict.ok
    assert verdict.detail == f"checked with {4096 * 2} B and {16 << 20} B ({1 << 19} B, repeated) of bfloat16"


def halves_swapped(group: Group, x: Tensor, result: Tensor) -> Tensor:
    return result.roll(len(result) // 2 // 128 * 128)


def groups_swapped(group: Group, x: Tensor, result: Tensor) -> Tensor:
    return torch.cat([result[:-356], result[-228:-100], result[-356:-228], result[-100:]])


def last_is_off(group: Group, x: Tensor, result: Tensor) -> Tensor:
    return off_by_a_little(group, x, result)


def last_is_not_given_back(group: Group, x: Tensor, result: Tensor) -> Tensor:
    x[-1] += 1
    return result


def _check_repeated(group: Group, break_it: Break) -> list[SelfTestVerdict]:
    def break_the_large(group: Group, x: Tensor, result: Tensor) -> Tensor:
        return result if len(x) == 100 else break_it(group, x, result)

    arms = {"broken": BrokenAllReduce(group, break_the_large)}
    return self_test(group, arms, row_elems=100, max_rows=2700, dtype=torch.float32)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (halves_swapped, r"rank 0: 1080000 B: 2\d{5} of 270000 sums exceed"),
        (groups_swapped, "rank 0: 1080000 B: 256 of 270000 sums exceed"),
        (last_is_off, "rank 0: 1080000 B: 1 of 270000 sums exceed the error bound, the largest error is 0.1"),
        (last_is_not_given_back, "rank 0: 1080000 B: changed its input"),
        (not_a_number, "rank 0: 1080000 B: 1 of 270000 sums exceed the error bound, the largest error is nan"),
    ],
)
def test_a_fault_in_a_message_of_repeated_numbers_is_found(break_it: Break, found: str) -> None:
    (verdict,) = run_in_process(2, _check_repeated, break_it)[0]
    assert not verdict.ok and re.match(found, verdict.detail), verdict.detail


def _check_all_repeated(group: Group) -> list[SelfTestVerdict]:
    names = [*all_reduce_names(), "flash:int4-g32-had,int5", "flash:int2-sym,fp8", "hierarchical:int3-g64"]
    arms = {name: make_all_reduce(name, group) for name in names}
    return self_test(group, arms, row_elems=99, max_rows=1350, dtype=torch.bfloat16)


def test_every_algorithm_passes_with_repeated_numbers_that_end_within_a_group() -> None:
    for verdicts in run_in_process(4, _check_all_repeated, num_nodes=2)[:1]:
        assert [verdict for verdict in verdicts if not verdict.ok] == []
        assert "267300 B (262144 B, repeated)" in verdicts[0].detail


def _found_in_one_of_two(world: Group) -> list[SelfTestVerdict]:
    own = [
        SelfTestVerdict(algorithm="ring", ok=world.rank < 2, detail="ranks 0 and 1 have different bits"),
        SelfTestVerdict(algorithm="one-shot", ok=True, detail="checked"),
    ]
    return agree(world, own, 2)


def test_what_one_replica_found_wrong_is_wrong_for_all() -> None:
    agreed = run_in_process(4, _found_in_one_of_two)
    assert [[verdict.ok for verdict in verdicts] for verdicts in agreed] == [[False, True]] * 4
    assert agreed[0][0].detail == "correct here, wrong on ranks 2 to 3; see their log"
    assert agreed[3][0].detail == "ranks 0 and 1 have different bits"


CPU = torch.device("cpu")


def messages(world_size: int, num_elems: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [KnownSum(rank, world_size, num_elems, dtype, CPU).own() for rank in range(world_size)]


@pytest.mark.parametrize("num_elems", [1, 4096, 10_000, 600_000])
def test_the_sum_of_all_messages_has_no_error(num_elems: int) -> None:
    inputs = messages(2, num_elems)
    known = KnownSum(1, 2, num_elems, torch.float32, CPU)
    one_shot = OneShotAllReduce(in_process_groups(2)[1])
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    assert known.errors(exact, one_shot) == (0, 0.0)
    assert known.is_own(inputs[1]) and not known.is_own(inputs[0])
    assert str(known).startswith(f"{inputs[1].nbytes} B")


def test_numbers_are_those_of_a_generator_of_integers_that_no_processor_changes() -> None:
    (first, second) = messages(2, 3)
    assert (first * (1 << 22)).tolist() == [-5306101.0, -8387673.0, -204199.0]
    assert (second * (1 << 22)).tolist() == [-4600092.0, -5906830.0, 2531719.0]


@pytest.mark.parametrize("world_size", [2, 8, 64, 1000])
def test_few_numbers_are_random_however_many_ranks_and_elements(world_size: int) -> None:
    known = KnownSum(0, world_size, 1 << 22, torch.bfloat16, CPU)
    assert known.random_elems % 128 == 0
    assert world_size * known.random_elems <= max(1 << 19, 4096 * world_size)
    assert len(known.own()) == 1 << 22


def test_a_long_message_has_no_period() -> None:
    (message, _) = messages(2, 1 << 22)
    for shift in (1 << 21, 1 << 20, 1 << 19, 1 << 17, 1 << 16):
        assert float((message == message.roll(shift)).float().mean()) < 0.2, shift
