"""Messages whose sum is known: the same numbers everywhere, few of them random, and every piece where it belongs."""

import pytest
import torch
from torch import Tensor

from tightwire.comm.all_reduce.known_sum import KnownSum
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.group.group import in_process_groups

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
    assert known.num_bytes == inputs[1].nbytes


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
