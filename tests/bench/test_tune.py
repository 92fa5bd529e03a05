"""``tune`` and ``explain`` end to end on a tiny model: measure, keep, read, choose."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console
from tiny import make_tiny

from tightwire.__main__ import main
from tightwire.bench import tune as tune_module
from tightwire.bench.comm.cells import Cells
from tightwire.bench.comm.measure import Outcome
from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.group.host import num_cores
from tightwire.comm.policy.choose import PolicyRequest
from tightwire.comm.policy.rules import FileRule, PolicyFile, write_policy_file
from tightwire.comm.policy.tune_file import Measured, Point, read_tuned, this_host, tune_path, write_tuned
from tightwire.server.config.flags import make_config

_SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, and a machine that counts as quiet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(OthersWatch, "share", lambda self: 0.0)
    yield tmp_path / "tightwire"


def flags(model: Path, *more: str) -> list[str]:
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16"]
    return [str(model), "--tp", "2", "--device", "cpu", *sizes, *more]


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_explain_and_serve_use_the_tuned_times(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = explained(capsys, *flags(model))
    assert before["measured"] is None

    assert main(["tune", *flags(model, "--seconds", "15", "--transport", "shared-memory")]) == 0
    shown = capsys.readouterr().out
    assert "one-shot" in shown and "over shared-memory" in shown and "written to" in shown

    host = this_host([], num_cores())
    records = read_tuned(tune_path(cache, host), host)
    setting = Setting(transport="shared-memory", device="cpu", world_size=2, num_nodes=1, dtype="float32")
    measured = records.of(setting)
    assert records.warning is None and measured is not None and measured.wrong == {}
    rows = measured.rows()
    assert {"one-shot", "two-shot", "ring", "native"} < set(rows)
    assert "flash-int8" in rows
    assert [size for size, _ in rows["one-shot"]] == [256, 1024, 4096]
    computing = records.computing_of(structs.replace(setting, transport="process-group", link="1gbit"))
    assert {"one-shot", "two-shot", "ring", "flash-int8"} <= set(computing) and "native" not in computing
    assert all(len(row) == 3 and all(us > 0 for _, us in row) for row in computing.values())

    after = explained(capsys, *flags(model))
    assert after["measured"] is not None and after["warning"] is None
    messages = after["messages"]
    assert isinstance(messages, list)
    assert {(m["phase"], m["num_rows"]) for m in messages} == {
        ("decode", 1),
        ("decode", 4),
        ("prefill", 2),
        ("prefill", 16),
    }
    for message in messages:
        chosen = [verdict for verdict in message["verdicts"] if verdict["chosen"]]
        assert len(chosen) == 1 and chosen[0]["error"] == 0
        assert all(verdict["measured_us"] > 0 for verdict in message["verdicts"])


def test_times_of_a_crowded_machine_are_not_kept(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OthersWatch, "share", lambda self: 0.4)
    measured = []
    monkeypatch.setattr(tune_module, "measure_all", lambda *_, **__: measured.append(1) or [])
    assert main(["tune", *flags(model, "--seconds", "1", "--transport", "shared-memory")]) == 1
    said = capsys.readouterr().err
    assert "other programs used 40% of this machine's cores before the measurement" in said and "--allow-busy" in said
    assert measured == [] and list(cache.rglob("*.json")) == [], "refused before anything is measured"
    assert main(["tune", *flags(model, "--allow-busy", "--transport", "shared-memory")]) == 0 and measured == [1]


def test_a_machine_that_becomes_crowded_is_refused_afterwards(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = iter((0.0, 0.4))
    monkeypatch.setattr(OthersWatch, "share", lambda self: next(shares))
    assert main(["tune", *flags(model, "--seconds", "1", "--transport", "shared-memory")]) == 1
    assert "other programs used 40% of this machine's cores while shared-memory was measured" in capsys.readouterr().err
    assert list(cache.rglob("*.json")) == []


def test_without_a_named_transport_all_that_work_are_measured(model: Path, cache: Path) -> None:
    for named, wanted in (("auto", {"shared-memory", "process-group"}), ("process-group", {"process-group"})):
        config = make_config({"model": str(model), "tp": 2, "device": "cpu", "transport": named})
        assert {setting.transport for setting in tune_module.make_plan(config, 60.0).settings} == wanted


def test_on_gpus_the_fastest_number_of_blocks_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that sum over peer memory are measured with 8 to 64 blocks; one that sums wrongly is not preferred."""
    peers, library = (Setting(name, "cuda", 2, 1, "bfloat16") for name in ("peer-memory", "process-group"))
    seconds, tried = {8: 3.0, 16: 2.0, 32: 4.0, 64: 1.0}, []

    def measured(plan: object, setting: Setting, console: object, allow_busy: bool, blocks: int) -> Measured:
        tried.append((setting.transport, blocks))
        points = tuple(Point("one-shot", size, size * seconds[blocks], 9, size, None) for size in (1024, 4096))
        wrong = {"two-shot": "off"} if blocks == 64 else {}
        return Measured(setting, points, (), wrong, "2026-11-28", peer_blocks=blocks)

    monkeypatch.setattr(tune_module, "_measure_setting", measured)
    request, host = PolicyRequest(row_elems=64, max_rows=16, max_decode_rows=4), this_host([], 1)
    plan = tune_module.TunePlan(
        settings=(peers, library), request=request, host=host, path=tune_path(cache, host), seconds=9.0
    )
    found = list(tune_module.measure_all(plan, Console()))
    assert tried == [*(("peer-memory", blocks) for blocks in (8, 16, 32, 64)), ("process-group", 32)]
    assert [each.peer_blocks for each in found] == [16, 32]
    write_tuned(plan.path, host, found)
    kept = read_tuned(plan.path, host).of(peers)
    assert kept is not None and kept.peer_blocks == 16


def test_explain_shows_a_table_for_each_message_and_follows_the_flags(
    model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *flags(model, "--allreduce", "flash-int4")]) == 0
    shown = capsys.readouterr().out
    assert "has not measured yet" in " ".join(shown.split())
    assert "decode, o_proj and down_proj: 1 row" in shown
    assert "prefill, o_proj and down_proj: 16 rows" in shown
    data = explained(capsys, *flags(model, "--comm-error-budget", "0.5", "--transport", "process-group"))
    messages = data["messages"]
    assert isinstance(messages, list)
    refused = [v["why"] for m in messages if m["phase"] == "prefill" for v in m["verdicts"] if not v["chosen"]]
    assert not any("no error budget" in why for why in refused)


def test_explain_shows_layers_separately_where_a_policy_file_does(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = FileRule(site="o_proj", phase="prefill", algorithm="flash:int4-g64,int4-g64", layers=(1,), reason="KL 0.001")
    path = tmp_path / "mix.json"
    write_policy_file(path, PolicyFile(made_for={"world_size": 8}, rules=(rule,)))
    data = explained(capsys, *flags(model, "--allreduce", f"policy:{path}"))
    assert "made for 8 ranks" in str(data["policy_warning"])
    messages = data["messages"]
    assert isinstance(messages, list)
    kinds = [(m["phase"], m["sites"], m["layers"], m["verdicts"][0]["algorithm"]) for m in messages]
    assert ("prefill", ["o_proj"], [1], rule.algorithm) in kinds
    assert ("prefill", ["o_proj"], [0], rule.algorithm) not in kinds
    assert {layers is None for phase, sites, layers, _ in kinds if phase == "decode" or sites == ["down_proj"]} == {
        True
    }
    (chosen,) = [m["verdicts"][0] for m in messages if m["layers"] == [1] and m["num_rows"] == 2]
    assert chosen["why"] == "policy file mix.json: KL 0.001"
    assert main(["explain", *flags(model, "--allreduce", f"policy:{path}")]) == 0
    assert "prefill, o_proj of layer 1: 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("explain", ["--allreduce", "magic"], "--allreduce: unknown all-reduce 'magic'"),
        ("explain", ["--allreduce-decode="], "--allreduce-decode: unknown all-reduce ''"),
        ("tune", ["--allreduce", "magic"], "--allreduce: unknown all-reduce 'magic'; choose one of auto, native"),
        ("tune", ["--tp", "9"], "cannot split"),
        ("explain", ["--tp", "9"], "cannot split"),
    ],
)
def test_wrong_options_are_refused_by_name(
    verb: str, arguments: list[str], message: str, model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(model), "--device", "cpu", *arguments]) == 2
    assert f"tightwire {verb}: " in (err := capsys.readouterr().err) and message in err


def test_an_unwritable_cache_is_refused_before_measuring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_module, "measure_all", lambda plan: pytest.fail("measured"))
    assert main(["tune", *flags(model, "--allow-busy")]) == 1
    assert "cannot be written (Not a directory)" in (err := capsys.readouterr().err) and "XDG_CACHE_HOME" in err


def test_reasons_are_readable_in_a_narrow_terminal(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["explain", *flags(model)]) == 0
    shown = capsys.readouterr().out
    # A reason may be wrapped between any two words: the width of its column depends on the times.
    assert "\u2026" not in shown and {"one-shot", "chosen:", "fastest", "lossless"} <= set(shown.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seconds", "0"], "--seconds: must be 1 to 3600, got 0"),
        (["--quality", "--tokens", "0"], "--tokens: must be at least 1, got 0"),
        (["--tokens", "5"], "--tokens is for --quality; --seconds limits the measurement of times"),
        (["--second", "5"], "unknown argument '--second'; did you mean '--seconds'?"),
    ],
)
def test_wrong_options_of_tune_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["tune", *argv])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_an_algorithm_with_a_wrong_answer_is_recorded_as_wrong() -> None:
    cells = Cells(1)
    outcomes = [
        Outcome(
            size=64,
            algorithm=name,
            digest="d",
            wire_bytes=64,
            formula_bytes=64,
            squared_exact=1.0,
            share_of_bound=share,
            seconds=[1e-6] * 3,
        )
        for name, share in (("ring", 0.5), ("one-shot", 7.0))
    ]
    cells.add(0, outcomes)
    setting = Setting(transport="process-group", device="cpu", world_size=1, num_nodes=1, dtype="float32")
    measured = tune_module.judge(setting, cells)
    assert set(measured.wrong) == {"one-shot"} and "7 times the algorithm's bound" in measured.wrong["one-shot"]
    assert set(measured.rows()) == {"ring"}


def test_sigterm_leaves_no_file_and_no_process(model: Path, tmp_path: Path) -> None:
    """A process of several threads and children takes it as it takes Ctrl-C."""
    tuning = subprocess.Popen(
        [sys.executable, "-m", "tightwire", "tune", *flags(model, "--seconds", "600", "--allow-busy")],
        env={**os.environ, "PYTHONPATH": str(_SOURCE), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(_session(tuning.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)  # itself, the fork server and two ranks
    assert len(_session(tuning.pid)) >= 4
    tuning.send_signal(signal.SIGTERM)
    _, err = tuning.communicate(timeout=120)
    assert tuning.returncode == 130 and "interrupted" in err and "Traceback" not in err, err
    assert list(tmp_path.rglob("*.json")) == list(tmp_path.glob("pymp-*")) == []
    while _session(tuning.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _session(tuning.pid) == []


def _session(leader: int) -> list[int]:
    """Processes of the session that ``leader`` began, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has ended meanwhile
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found
