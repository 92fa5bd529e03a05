"""The host's file: read back what was written, merge by setting, and never trust a damaged or foreign one."""

import fcntl
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.policy import tune_file
from tightwire.comm.policy.tune_file import (
    Computing,
    Host,
    Measured,
    Point,
    TuneRecords,
    read_tuned,
    this_host,
    tune_path,
    write_tuned,
)

HOST = Host(cpu="a cpu", num_cores=2, devices=(), torch="2.13.0", tightwire="0.1.0")


def setting(world_size: int = 2, transport: str = "shared-memory") -> Setting:
    return Setting(transport=transport, device="cpu", world_size=world_size, num_nodes=1, dtype="bfloat16")


def measured(where: Setting, us: float = 10.0, wrong: dict[str, str] | None = None) -> Measured:
    points = tuple(
        Point(algorithm=name, num_bytes=size, us=us * size, num_calls=9, wire_bytes=size, relative_error=0.0)
        for name in ("one-shot", "ring")
        for size in (4096, 1024)
    )
    computing = (Computing("ring", 1024, us), Computing("wrong", 1024, us))
    return Measured(
        setting=where, points=points, computing=computing, wrong=wrong or {}, date="2026-01-01T00:00:00+00:00"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tune_path(tmp_path, HOST)


def test_nothing_measured_is_nothing_to_warn_of(path: Path) -> None:
    records = read_tuned(path, HOST)
    assert records.of(setting()) is None and records.warning is None


def test_computing_holds_over_any_wire_for_as_many_ranks_of_the_same_numbers(path: Path) -> None:
    write_tuned(path, HOST, [measured(setting(2), 3.0, wrong={"wrong": "1 + 1 = 3"}), measured(setting(4), 5.0)])
    records = read_tuned(path, HOST)
    behind = structs.replace(setting(4), transport="process-group", num_nodes=2, link="1gbit")
    assert records.computing_of(behind) == {"ring": [(1024, 5.0)], "wrong": [(1024, 5.0)]}
    assert records.computing_of(setting(2)) == {"ring": [(1024, 3.0)]}
    assert records.computing_of(setting(3)) == {}
    assert records.computing_of(structs.replace(setting(4), dtype="float32")) == {}


def test_settings_are_added_and_the_same_one_replaced(path: Path) -> None:
    write_tuned(path, HOST, [measured(setting(2)), measured(setting(4))])
    write_tuned(path, HOST, [measured(setting(2), us=20.0), measured(setting(2, "process-group"))])
    records = read_tuned(path, HOST)
    assert len(records.settings) == 3
    found = records.of(setting(2))
    assert found is not None and found.rows()["ring"] == [(1024, 20480.0), (4096, 81920.0)]
    assert records.of(setting(4)) == measured(setting(4))
    assert records.of(setting(3)) is None


def test_what_summed_wrongly_has_no_times(path: Path) -> None:
    write_tuned(path, HOST, [measured(setting(), wrong={"ring": "off by 3"})])
    found = read_tuned(path, HOST).of(setting())
    assert found is not None and set(found.rows()) == {"one-shot"} and found.wrong == {"ring": "off by 3"}


def _with(path: Path, **changes: object) -> bytes:
    content = msgspec.json.decode(path.read_bytes())
    return msgspec.json.encode(content | changes)


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (lambda path: b"", "is damaged"),
        (lambda path: path.read_bytes()[:-40], "is damaged"),
        (lambda path: b"\xff\xfe{", "is damaged"),
        (lambda path: b"[1, 2]", "is damaged"),
        (lambda path: b'{"schema": 2, "x": ' + 9999 * b"[", "is damaged"),
        (lambda path: _with(path, schema=1), "has schema 1 and this version reads 2"),
        (lambda path: _with(path, settings=[{}]), "is damaged"),
        (lambda path: path.read_bytes().replace(b"a cpu", b"b cpu"), "measured on another host .b cpu."),
        (lambda path: path.read_bytes().replace(b'"us": 10240.0', b'"us": -1.0'), "impossible sizes or times"),
        (lambda path: path.read_bytes().replace(b"4096", b"1024"), "impossible sizes or times"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_a_warning_and_nothing_measured(
    path: Path, damage: Callable[[Path], bytes], warning: str
) -> None:
    write_tuned(path, HOST, [measured(setting())])
    path.write_bytes(damage(path))
    records = read_tuned(path, HOST)
    assert records.settings == ()
    assert records.warning is not None and re.search(warning, records.warning)


def test_a_new_measurement_takes_the_place_of_a_damaged_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("not json")
    write_tuned(path, HOST, [measured(setting())])
    assert read_tuned(path, HOST).of(setting()) == measured(setting())


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tuned(path, HOST, [measured(setting())])
    before = path.read_bytes()

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_tuned(path, HOST, [measured(setting(3))])
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path, path.with_suffix(".lock")]


def test_readers_never_see_half_a_file(path: Path) -> None:
    write_tuned(path, HOST, [measured(setting())])
    done = threading.Event()

    def write() -> None:
        for us in range(1, 40):
            write_tuned(path, HOST, [measured(setting(), us=float(us))])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert read_tuned(path, HOST).warning is None
    writer.join()


def test_settings_written_at_once_are_all_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to have read the file gives the others every chance to read it too before it writes."""
    read = tune_file.read_tuned
    seen: list[int] = []

    def read_and_dawdle(path: Path, host: Host) -> TuneRecords:
        records = read(path, host)
        seen.append(len(records.settings))
        time.sleep(0.05)
        return records

    monkeypatch.setattr(tune_file, "read_tuned", read_and_dawdle)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda size: write_tuned(path, HOST, [measured(setting(size))]), range(2, 6)))
    assert seen == [0, 1, 2, 3]
    assert {measured.setting.world_size for measured in read(path, HOST).settings} == {2, 3, 4, 5}


def test_a_writer_that_hangs_is_not_waited_for_forever(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with path.with_suffix(".lock").open("w") as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another process has held .*\.lock for 0.05 s; end the"):
            write_tuned(path, HOST, [measured(setting())], timeout_s=0.05)
    assert not path.exists()
    write_tuned(path, HOST, [measured(setting())], timeout_s=0.05)


def test_the_fingerprint_follows_what_times_depend_on(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast 9000\n\nprocessor\t: 1\nmodel name\t: Fast 9000\n")
    host = this_host(["A"], 2, cpuinfo)
    assert (host.cpu, host.num_cores, host.devices) == ("Fast 9000", 2, ("A",))
    others = [this_host(["B"], 2, cpuinfo), this_host(["A"], 3, cpuinfo), this_host([], 2, tmp_path / "none")]
    assert len({host.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert host.fingerprint == this_host(["A"], 2, cpuinfo).fingerprint
