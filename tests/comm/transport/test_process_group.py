"""What NCCL's transport does where a GPU's library would wait."""

import threading
import time
from typing import cast

import pytest
import torch

from tightwire.comm.errors import CommError
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.transport.process_group import NcclTransport
from tightwire.comm.transport.store_notes import FailureNotes


def test_closing_does_not_wait_for_other_ranks_or_for_graphs() -> None:
    """NCCL's shutdown waits for both, its abort may wait for graphs; a rank that failed must say so first."""
    ended, calls = threading.Event(), list[str]()

    class Group:
        def abort(self) -> None:
            calls.append("abort")
            ended.wait(60)

        def shutdown(self) -> None:
            calls.append("shutdown")
            ended.wait(60)

    transport = NcclTransport(
        Group(),
        cast(FailureNotes, None),
        rank=0,
        world_size=2,
        device=torch.device("cpu"),
        timeout_s=60.0,
        ledger=Ledger(),
    )
    start = time.monotonic()
    transport.close()
    transport.close()
    assert time.monotonic() - start < 30 and calls == ["abort"]
    with pytest.raises(CommError, match="rank 0: this group is closed"):
        transport.all_reduce(torch.ones(1))
    ended.set()
