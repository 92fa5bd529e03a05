"""The whole bench: against a fake server that can lie, and once against a real one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import pytest
from helpers.server.fake_openai import running
from helpers.server.fake_ttft_server import FakeTtftServer
from tiny import make_tiny

from tightwire.bench import cli
from tightwire.bench.report import console
from tightwire.bench.server_process import ServerFailedError, ServerProcess
from tightwire.bench.ttft import report
from tightwire.bench.ttft.bench import TtftBench
from tightwire.bench.ttft.facts import find_facts
from tightwire.bench.ttft.options import TtftOptions

LINK = {"name": "1mbit", "asked_bytes_per_s": 125e3, "measured_bytes_per_s": 120e3, "latency_s": 0.0} | {
    "emulation": "user-space",
    "reason": "not root",
}


class FakeChild:
    """In place of a server's process: what ``wait_ready`` and ``check`` say of it."""

    def __init__(self, url: str, death: str | None = None) -> None:
        self.url, self._death = url, death

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_ready(self, route: str, timeout_s: float) -> None:
        assert route == "/health/ready"

    def check(self) -> None:
        if self._death is not None:
            raise ServerFailedError(self._death)


Bench = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("ttft") / "tiny")


def options_of(model: Path, *flags: str) -> TtftOptions:
    small = f"{model} --device cpu --kv-cache-memory 8MiB --prompt-lens 12 --concurrency 1 --repeats 2 --output-len 3"
    return TtftOptions.from_argv([*small.split(), "--algorithms", "flash-int8", *flags], verb="ttft")


@pytest.fixture
def bench(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs it against a fake that behaves as told: exit status, what the JSON file holds, stderr."""

    def run(
        *flags: str, death: str | None = None, plots: bool = False, **behaviour: Any
    ) -> tuple[int, dict[str, Any], str]:
        if not plots:  # which take seconds
            monkeypatch.setattr(report, "make_sections", lambda result: [])
        for name in ("_LEAST_SECONDS", "_LINE_SECONDS"):  # on a slow machine it would say how far it is
            monkeypatch.setattr(console, name, 1e9)
        options = options_of(model, "--output", str(tmp_path), *flags)
        with running(FakeTtftServer(proof=find_facts(options).proof, **behaviour)) as fake:
            started: list[Sequence[str]] = []

            def start(argv: Sequence[str], folder: Path) -> ServerProcess:
                started.append(argv)
                return cast(ServerProcess, FakeChild(cast(FakeTtftServer, fake).url, death))

            status = TtftBench(options, start=start).run()
        prompts = [tuple(body["prompt"]) for body in fake.bodies if body.get("stream")]
        assert {len(prompt) for prompt in prompts} <= {12} and len({prompt[:4] for prompt in prompts}) == len(prompts)
        assert "--allreduce" not in started[0], "the server's own is auto"
        assert started[0][started[0].index("--allreduce-extra") + 1] == "flash-int8"
        written = list(tmp_path.glob("*.json"))
        shown = capsys.readouterr()
        last = json.loads(shown.out.splitlines()[-1])
        assert len(shown.err.splitlines()) == bool(last["error"])
        return status, json.loads(written[0].read_text()) if written else last, shown.err

    return run


@pytest.mark.parametrize("stages", [True, False])
def test_layouts_are_compared_on_one_hybrid_server(
    model: Path, capsys: pytest.CaptureFixture[str], stages: bool
) -> None:
    small = f"{model} --device cpu --kv-cache-memory 8MiB --prompt-lens 12 --concurrency 1,2 --repeats 2 --output-len 3"
    options = TtftOptions.from_argv([*small.split(), "--layouts", "tensor,hybrid", "--json"], verb="ttft")
    with running(FakeTtftServer(proof=find_facts(options).proof, stages=stages)) as fake:
        started: list[Sequence[str]] = []

        def start(argv: Sequence[str], folder: Path) -> ServerProcess:
            started.append(argv)
            return cast(ServerProcess, FakeChild(cast(FakeTtftServer, fake).url))

        status = TtftBench(options, start=start).run()
    assert started[0][started[0].index("--layout") + 1] == "hybrid" and "--allreduce-extra" not in started[0]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    if not stages:
        assert status == 1 and result["error"].startswith("wrong AllReduce: hybrid, 12 prompt tokens, 1 at a time: ")
        return
    rows = {(row["arm"], row["concurrency"]): row for row in result["cells"]}
    assert status == 0 and rows["tensor", 1]["ratio"] is None and rows["hybrid", 2]["ratio"]["n"] == 2
    assert rows["hybrid", 1]["sent_bytes"] == 0 < rows["tensor", 1]["sent_bytes"] and result["recommended"] == []


def test_an_honest_server_is_measured_and_a_policy_recommended(bench: Bench, tmp_path: Path) -> None:
    status, result, _ = bench(
        *("--concurrency", "1,2", "--repeats", "3"),
        plots=True,
        link=LINK,
    )
    assert (status, result["error"], result["schema"]) == (0, None, "tightwire.bench.ttft/2")
    rows = {(row["arm"], row["concurrency"]): row for row in result["cells"]}
    assert {key: row["ttft_s"]["n"] for key, row in rows.items()} == {
        ("auto", 1): 3,
        ("flash-int8", 1): 3,
        ("auto", 2): 6,
        ("flash-int8", 2): 6,
    }
    assert rows["auto", 1]["ratio"] is None and rows["flash-int8", 1]["ratio"]["n"] == 3
    assert rows["flash-int8", 1]["bound"]["wire_s"] < rows["auto", 1]["bound"]["wire_s"]
    assert rows["flash-int8", 2]["bound"] is None, "whose bytes are whose is not known"
    assert result["recommended"][0]["arm"] == "auto", "the only lossless one; which is faster is chance here"
    assert len(rows["flash-int8", 2]["samples"]["ttft_ratio"]) == 3 and result["comm"]["transport"] == "fake"
    assert (next(tmp_path.glob("*.csv")).read_text().count("\n"), len(list(tmp_path.glob("*.html")))) == (5, 1)


@pytest.mark.parametrize("beside", ["1", "2"])
def test_an_arm_that_runs_another_algorithm_fails_the_run(bench: Bench, beside: str) -> None:
    status, result, said = bench("--concurrency", beside, runs_instead="flash-int4")
    assert status == 1 and "wrong AllReduce" in result["error"] and "flash-int4" in said


@pytest.mark.parametrize("first_wrong", [6, 7])
def test_an_arm_that_changes_later_fails_the_run_and_keeps_whole_rounds(bench: Bench, first_wrong: int) -> None:
    # Two arms, two warm-ups each: the fifth request is the first one that is timed, and rounds have two.
    status, result, _ = bench(runs_instead="ring", runs_instead_from=first_wrong)
    assert status == 1 and "wrong AllReduce" in result["error"] and "ring" in result["error"]
    assert [len(row["samples"]["ttft_s"]) for row in result["cells"]] == [1, 1] and result["recommended"] == []


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"ends_after": 2}, "12 prompt tokens and 2 of the answer"),
        ({"refuses": (500, "out of luck")}, "out of luck"),
        (
            {"refuses": (500, "x"), "refuses_from": 6, "death": "the server ended by signal SIGKILL"},
            "by signal SIGKILL",
        ),
    ],
)
def test_failures_end_the_run_with_a_reason(bench: Bench, behaviour: dict[str, Any], words: str) -> None:
    status, result, said = bench(**behaviour)
    assert status == 1 and words in result["error"] and words in said


def test_ctrl_c_keeps_what_was_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = TtftBench.keep, list[int]()

    def interrupt_after_two(self: TtftBench) -> None:
        keep(self)
        kept.append(1)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TtftBench, "keep", interrupt_after_two)
    status, result, _ = bench("--repeats", "3")
    assert (status, result["error"]) == (130, "interrupted")
    assert [row["rounds"] for row in result["cells"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt-lens 511", "the server's context is 512"),
        ("--prompt-lens 400 --concurrency 64 --kv-cache-memory 1MiB", "raise --kv-cache-memory"),
        ("--output /proc/nowhere", "cannot be written"),
    ],
)
def test_impossible_options_are_refused_before_a_server_starts(
    model: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    def start(argv: Sequence[str], folder: Path) -> ServerProcess:
        raise AssertionError("nothing is to be started")

    assert TtftBench(options_of(model, *flags.split()), start=start).run() == 2
    shown = capsys.readouterr()
    assert words in shown.err and words in json.loads(shown.out)["error"]


def test_a_real_server_passes_every_proof(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        f"{model} --device cpu --kv-cache-memory 8MiB --max-num-batched-tokens 64 --prompt-lens 100 --concurrency 1,3"
    )
    assert (
        cli.main(["ttft", *flags.split(), "--algorithms", "auto,flash-int4", "--repeats", "2", "--output-len", "3"])
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["arm"], row["concurrency"]) for row in result["cells"]] == [
        *(("auto", 1), ("flash-int4", 1), ("auto", 3), ("flash-int4", 3))
    ]
    for row in result["cells"]:
        assert sum(part or 0.0 for part in row["parts_s"].values()) > 0
    assert result["cells"][1]["sent_bytes"] < result["cells"][0]["sent_bytes"]
