"""What a starting rank does while another does not answer: it names the other, and does not wait for ever."""

import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CommError, PeerLostError
from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import network_facts
from tightwire.model.stages import StagePlan
from tightwire.server.config.hosts import HostOptions
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.rank_setup import RankIdentity
from tightwire.server.ranks import rank_main
from tightwire.server.ranks.reporter import Reporter


def _identity(rank: int, port: int) -> RankIdentity:
    names = {"to_parent": "", "inboxes": (), "reporter": "", "parent_pid": 0, "store_fd": None, "work_fd": 0}
    return RankIdentity(rank=rank, world_size=3, store_port=port, **names)


def test_a_store_that_accepts_and_never_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CommError, match=f"rank 0 did not answer rank 1 at 127.0.0.1:{port} for 0.3 s"):
            rank_main._open_store(_identity(1, port), 0.3)


def test_a_rank_that_waits_says_for_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_main, "_SAY_AGAIN", timedelta(seconds=0.05))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: list[str] = []
    told = threading.Condition()

    class _Reporter:
        def begin(self, doing: str) -> None:
            with told:
                said.append(doing)
                told.notify()

    def wait_for(doing: str) -> bool:
        with told:
            return told.wait_for(lambda: doing in said, 20)

    joining = rank_main._Joining(_identity(1, 0), cast(Any, ServeConfig()), store)
    waiting = threading.Thread(target=joining.await_others, args=(cast(Reporter, _Reporter()), "load"))
    waiting.start()
    assert wait_for("waiting for ranks 0 and 2 to load")
    store.set("load/2", "")
    assert wait_for("waiting for rank 0 to load")
    store.set("load/0", "")
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("which", "told", "said", "ranks"),
    [
        (
            "of_stage",
            [0],
            "rank 2 lost rank 2 of 4 in stage 1; from here on ranks 2, 3 are numbered from 0: lost",
            (2,),
        ),
        ("stages", [0, 1], "rank 2 lost ranks 0 and 2 of 4 in stages; from here on ranks 0, 2 are numbered", (0, 2)),
    ],
)
def test_errors_inside_stages_have_the_numbers_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, which: str, told: list[int], said: str, ranks: tuple[int, ...]
) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(rank_main, "open_process_group", lambda *_, **given: opened.update(given))
    stages = StagePlan(((0, 1), (1, 2)), pipeline=True, ranks_each=2)
    plan = SimpleNamespace(stages=stages, is_pipeline=True, device="cpu", transport="sockets", link=None)
    work: Any = SimpleNamespace(plan=plan, config=ServeConfig())
    joining = rank_main._Joining(msgspec.structs.replace(_identity(2, 0), world_size=4), work, cast(Any, None))
    _ = joining.of_stage() if which == "of_stage" else joining.stages(None)
    error = opened["numbered"](PeerLostError("lost", told))
    assert isinstance(error, PeerLostError) and error.ranks == ranks
    assert str(error).startswith(said)


@pytest.mark.parametrize(("name", "most_unsent"), [("stages", 0), ("beside", 36_000)])
def test_keys_and_values_leave_the_wire_to_hidden_states(
    monkeypatch: pytest.MonkeyPatch, name: str, most_unsent: int
) -> None:
    """A millisecond of 12 MB/s, and a round trip of two."""
    opened: dict[str, Any] = {}
    monkeypatch.setattr(rank_main, "open_process_group", lambda *_, **given: opened.update(given))
    facts = network_facts([PairFacts((0, 1), 2e-3, 0.0, 12e6)])
    plan = SimpleNamespace(stages=StagePlan(((0, 1), (1, 2))), device="cpu", transport="sockets", link=facts)
    work: Any = SimpleNamespace(plan=plan, config=ServeConfig())
    rank_main._Joining(_identity(1, 0), work, cast(Any, None)).stages(None, name)
    assert opened["sockets"].most_unsent == most_unsent


@pytest.mark.parametrize(("device", "segment_fd"), [("cpu", 7), ("cuda", None)])
def test_ranks_of_a_host_share_memory_only_on_cpus(
    monkeypatch: pytest.MonkeyPatch, device: str, segment_fd: int | None
) -> None:
    """Four ranks on two hosts. Their sums on GPUs are NCCL's, inside a host too."""
    joined: dict[str, Any] = {}
    monkeypatch.setattr(rank_main, "open_process_group", lambda *_, **given: None)
    monkeypatch.setattr(rank_main.nodes, "join_nodes", lambda *_, **given: joined.update(given))
    monkeypatch.setattr(rank_main.torch.cuda, "set_device", lambda device: None)
    plan = SimpleNamespace(
        is_pipeline=False, stages=None, device=device, transport="process-group", peer_blocks=0, link=None, num_nodes=2
    )
    config = ServeConfig(parallel=ParallelOptions(tp=4), hosts=HostOptions(nnodes=2))
    identity = msgspec.structs.replace(_identity(2, 0), world_size=4, node_segment_fd=7)
    rank_main._Joining(identity, cast(Any, SimpleNamespace(plan=plan, config=config)), cast(Any, None)).replica(None)
    assert joined["segment_fd"] == segment_fd
