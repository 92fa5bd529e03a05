"""The probes that need torch, as far as they go without a GPU, and with one where there is one."""

import pytest
import torch

from tightwire.bench.doctor import gpus
from tightwire.bench.doctor.facts import PeerTest
from tightwire.comm.transport.peer_access import PeerCheck


def test_each_pair_is_reported_before_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PeerCheck(False, "copy engine: 3 of 9 values arrived wrong", None)
    outcomes = {("cuda:0", "cuda:1"): PeerCheck(True, "whole", 20.0), ("cuda:1", "cuda:0"): lost}
    monkeypatch.setattr(gpus, "claimed_peers", lambda: [(0, 1), (1, 0)])
    monkeypatch.setattr(gpus, "check_peer_writes", lambda writer, owner: outcomes[str(writer), str(owner)])

    told = [(facts.under_way, len(facts.tests)) for facts in gpus.peers()]
    *_, last = gpus.peers()

    assert told == [((0, 1), 0), ((1, 0), 1), (None, 2)]
    assert last.tests == [PeerTest(0, 1, True, "whole", 20.0), PeerTest(1, 0, *lost)]


def test_without_cuda_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = gpus.cuda()
    assert (facts.devices, facts.peers, facts.nccl, facts.torch) == ([], [], None, str(torch.__version__))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_of_this_machine() -> None:
    facts = gpus.cuda()
    assert len(facts.devices) == torch.cuda.device_count() and facts.nccl is not None
    assert all(device.memory_bytes > 1 << 30 for device in facts.devices)
