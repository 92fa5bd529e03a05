"""The check itself, between two places of host memory: it passes what arrives whole and names what does not."""

import pytest
import torch
from torch import Tensor

from tightwire.comm.transport.peer_check import check_peer_writes, claimed_peers

CPU = torch.device("cpu")


def test_what_arrives_whole_passes_with_its_speed() -> None:
    check = check_peer_writes(CPU, CPU)
    assert check.ok and check.gb_per_s is not None and check.gb_per_s > 0


def test_what_is_lost_is_counted_and_not_timed() -> None:
    def lose_the_end(target_N: Tensor, source_N: Tensor) -> None:
        target_N[:-7].copy_(source_N[:-7])

    check = check_peer_writes(CPU, CPU, copy=lose_the_end)
    assert check == (False, "copy engine: 7 of 1048576 values arrived wrong", None)


def test_a_kernels_stores_are_looked_at_apart() -> None:
    def garble_strided(target_N: Tensor, source_N: Tensor) -> None:
        target_N.copy_(source_N if target_N.is_contiguous() else source_N ^ 1)

    check = check_peer_writes(CPU, CPU, copy=garble_strided)
    assert not check.ok and check.detail.startswith("kernel stores: 1048576 of")


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_claimed_peers_hold_what_is_written() -> None:
    for writer, owner in claimed_peers():
        check = check_peer_writes(torch.device("cuda", writer), torch.device("cuda", owner))
        assert check.ok, check.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_holds_what_it_writes_itself() -> None:
    assert check_peer_writes(torch.device("cuda", 0), torch.device("cuda", 0)).ok
