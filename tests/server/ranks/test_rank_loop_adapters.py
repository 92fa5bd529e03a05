"""Loading an adapter on a rank: whatever goes wrong is the load's answer, and the rank goes on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tightwire.model.adapters.product import AdapterRoom
from tightwire.server.ipc.messages import AdapterLoaded, LoadSlot
from tightwire.server.ranks import rank_loop


def test_an_unexpected_error_refuses_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("a broken disk")

    monkeypatch.setattr(rank_loop, "open_adapter", fail)
    sent: list[AdapterLoaded] = []
    cleared: list[int] = []
    reporter: Any = SimpleNamespace(rank=1, begin=str, send=sent.append)
    slots: Any = SimpleNamespace(room=AdapterRoom(1, 16), load=print, clear=cleared.append)
    loader = rank_loop.AdapterLoader(slots, SimpleNamespace(), reporter)  # pyright: ignore[reportArgumentType]
    loader.load(LoadSlot(id=7, slot=0, folder=str(Path("poet"))))
    assert cleared == [0] and sent[0].id == 7 and "a broken disk" in sent[0].refusal
