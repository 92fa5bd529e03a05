"""One host: nothing to wait for, nobody to tell, and the engine hears at once what it would hear from other hosts."""

from pathlib import Path

from helpers.server.hosts import PLAN, Told, tiny_checkpoint

from tightwire.server.hosts.base import Hosts


async def test_the_engine_hears_at_once_what_other_hosts_would_tell(tmp_path: Path) -> None:
    told = Told()
    alone = Hosts(range(2), None, told)
    await alone.join()
    assert await alone.find_model("smollm2-135m", lambda *_: None) == "smollm2-135m"
    assert await alone.agree(tiny_checkpoint(tmp_path), PLAN) is PLAN
    assert list(alone.inboxes(["a", "b"])) == ["a", "b"]
    alone.relay_exit(0, -9)
    assert not told.exits, "the engine knows it already"
    alone.note_ready()
    assert told.serving
    alone.ask_stop()
    assert told.stops == ["this host"]
    alone.fail(1, "a rank was killed")
    await alone.close()
    assert not told.ends


def test_no_host_is_named_and_all_ranks_are_watched() -> None:
    alone = Hosts(range(3), None, Told())
    assert (alone.watched, alone.node_of(2), alone.refusal) == (range(3), "", "")
