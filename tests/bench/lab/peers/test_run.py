"""`bench lab peers` with fake servers: equal prompts for all, wrong and dead servers are reported, no process is left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.fake_openai import FakeServer, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from tightwire.bench import cli
from tightwire.bench.lab.peers import arms, report, run
from tightwire.model.checkpoint.tensors import EMBEDDING
from tightwire.model.open import open_checkpoint

_SHORT = ["--rounds", "1", "--concurrency", "1,2", "--num-requests", "1,2", "--input-len", "8", "--output-len", "4"]


def test_every_server_gets_the_same_prompts_and_faulty_ones_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with running(FakeServer()) as one, running(FakeServer()) as two, running(FakeServer(answer=["no"])) as wrong:
        servers = f"one={one.url},two={two.url},wrong={wrong.url},dead=http://127.0.0.1:9"
        status = cli.main(["lab", "peers", "--servers", servers, *_SHORT, "--output", str(tmp_path)])

    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    faults = {peer["name"]: peer["fault"] for peer in result["peers"]}
    assert status == 0
    assert faults["one"] is None and faults["two"] is None
    assert "greedy answers are not those" in faults["wrong"]
    assert "does not answer" in faults["dead"]
    ends = [[body["prompt"].split()[4:] for body in server.bodies] for server in (one, two)]
    assert ends[0] == ends[1], "all but the first words, which no prefix cache may know"
    measured = {(cell["server"], cell["concurrency"], *cell["medians"]) for cell in result["cells"]}
    metrics = ("ttft_s", "tpot_s", "output_tokens_per_s")
    assert measured == {(name, count, *metrics) for name in ("one", "two") for count in (1, 2)}
    kept = json.loads(Path(result["files"][0]).read_text())
    assert kept["peers"][1]["turns"][0]["loads"][0]["ttft_s"]["n"] == 1
    assert "dead was left out" in Path(result["files"][2]).read_text()
    assert any(line.startswith("note: dead was left out: it does not answer") for line in printed)


def test_without_any_server_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "peers", "--servers", "dead=http://127.0.0.1:9", *_SHORT]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"] == "no server could be measured"


_MEASURED = {
    "name": "1 in flight",
    "concurrency": 1,
    "prompt_tokens": 8,
    "generated_tokens": 4,
    "succeeded": 1,
    "ttft_s": {"p50": 0.1},
    "tpot_s": {"p50": 0.01},
    "output_tokens_per_s": 50.0,
}


def test_an_interrupted_run_keeps_its_rounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted_in_round_two(*_: Any, seed: int, **__: Any) -> dict[str, Any]:
        if seed == 1 + 2:  # of the options, plus the round
            raise KeyboardInterrupt
        return {"cells": [_MEASURED], "files": []}

    monkeypatch.setattr(run, "bench_serve", interrupted_in_round_two)
    with running(FakeServer()) as one:
        options = ["--servers", f"one={one.url}", *_SHORT, "--rounds", "2", "--output", str(tmp_path)]
        status = cli.main(["lab", "peers", *options])

    printed = capsys.readouterr().out.splitlines()
    result = json.loads(printed[-1])
    assert (status, result["error"], result["rounds"]) == (130, "interrupted", 1)
    assert "note: interrupted: 1 of 2 rounds" in printed
    assert len(json.loads(Path(result["files"][0]).read_text())["peers"][0]["turns"]) == 1
    assert "interrupted: 1 of 2 rounds" in Path(result["files"][2]).read_text()


def test_no_round_starts_that_would_end_after_the_time_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def half_a_minute(*_: Any, seed: int, **__: Any) -> dict[str, Any]:
        nonlocal now_s
        now_s += 30.0 if seed else 0.0  # the warm-up has seed 0
        return {"cells": [_MEASURED], "files": []}

    monkeypatch.setattr(run, "bench_serve", half_a_minute)
    monkeypatch.setattr(run.time, "perf_counter", lambda: now_s)
    with running(FakeServer()) as one:
        status = cli.main(
            ["lab", "peers", "--servers", f"one={one.url}", *_SHORT, "--rounds", "9", "--time-limit", "100"]
        )

    printed = capsys.readouterr().out.splitlines()
    assert (status, json.loads(printed[-1])["rounds"]) == (0, 3)
    assert "note: the time limit was reached: 3 of 9 rounds" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peers_multiply_in_the_type_of_the_setup(dtype: str, tmp_path: Path) -> None:
    for program in ("vllm/bin/python", "transformers/bin/transformers"):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    setup = arms.Setup(
        model="m", gguf=tmp_path / "m.gguf", weights=tmp_path, peers=tmp_path, num_threads=1, torch_dtype=dtype
    )

    for name in ("vllm", "transformers"):
        arm = arms.make_arm(name, setup)
        assert arm.numbers == arm.command[arm.command.index("--dtype") + 1] == dtype


def test_a_tightwire_arm_has_its_flags_in_its_name(tmp_path: Path) -> None:
    setup = arms.Setup(model="m", gguf=tmp_path / "m.gguf", weights=tmp_path, peers=tmp_path, num_threads=1)
    arm = arms.make_arm("tightwire-tp2-q4-int8-gloo:flash:int8,int4", setup)
    assert arm.name == "tightwire TP 2, flash:int8,int4, gloo, 4-bit, int8 activations"
    words = " ".join(arm.command)
    assert (
        "--tp 2 --layout tensor --allreduce flash:int8,int4" in words
        and "--quantization auto --activations int8" in words
    )
    assert "--transport process-group" in words
    staged = arms.make_arm("tightwire-tp2-q4-hybrid", setup)
    assert staged.name == "tightwire TP 2, hybrid, 4-bit" and "--layout hybrid --allreduce auto" in " ".join(
        staged.command
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--servers", "vlm"], "unknown server 'vlm'"),
        (["--servers", "a=http://x,a=http://y"], "each server once"),
        (["--num-requests", "1,2"], "a number for each of the 3"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--nnodes", "2"], "--nnodes above 1 and --link"),
        (["--time-limit", "-1"], "--time-limit: must be above 0"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["lab", "peers", "--servers", "a=http://127.0.0.1:9", *options])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_ratios_are_paired_by_common_rounds() -> None:
    def peer(name: str, by_round: dict[int, float]) -> dict[str, Any]:
        load = {"concurrency": 1, "tpot_s": None, "output_tokens_per_s": None}
        turns = [{"round": n, "loads": [{**load, "ttft_s": {"p50": value}}]} for n, value in by_round.items()]
        return {"name": name, "turns": turns}

    base = peer("ours", {n: 0.1 * n for n in range(1, 7)})
    other = peer("theirs", {n: 0.2 * n for n in range(1, 6)})
    cells = report.summarize([base, other], seed=0)

    comparison = cells[1]["comparisons"]["ttft_s"]
    assert cells[0]["comparisons"] == {}
    assert (comparison["ratio"], comparison["verdict"], comparison["n"]) == (pytest.approx(2.0), "slower", 5)


def test_the_peers_get_the_weights_in_bfloat16_without_an_end_token(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "m.gguf", "Q8_0")
    setup = arms.Setup(model=str(source), gguf=source, weights=tmp_path / "w", peers=tmp_path, num_threads=1)
    run._convert(setup)  # pyright: ignore[reportPrivateUsage]
    folder = tmp_path / "w" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id is None and model.dtype == torch.bfloat16
    exact = torch.empty_like(model.model.embed_tokens.weight)
    open_checkpoint(str(source)).reader().read_into(exact, EMBEDDING, rows=range(len(exact)))
    assert torch.equal(model.model.embed_tokens.weight, exact)
    assert AutoTokenizer.from_pretrained(folder).encode("abc") == open_checkpoint(str(source)).tokenizer().encode("abc")
    (folder / "config.json").unlink()
    run._convert(setup)  # pyright: ignore[reportPrivateUsage] - what is there is not written again
    assert not (folder / "config.json").exists()
