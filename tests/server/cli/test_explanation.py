"""What ``tightwire explain`` says beside the AllReduces."""

import json
import os
from pathlib import Path

import pytest
from helpers.model.family_models import make_family_folder
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny

from tightwire.comm.group.numa import NumaNode
from tightwire.model.families import family_named
from tightwire.server.cli.explain import explain
from tightwire.server.plan import run_plan


@pytest.mark.parametrize(("family", "times"), [("Gemma 3", 1), ("Llama", 0)])
def test_blocks_by_kind_of_layer_of_a_model_with_windows(
    family: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_family_folder(family_named(family), tmp_path)
    flags = ["--tp", "2", "--max-model-len", "96", "--max-num-seqs", "16", "--max-num-batched-tokens", "16"]
    assert explain([str(folder), *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    line = (
        "KV cache: a sequence of 96 tokens takes 6 for layers that attend to all tokens and at most 30 for those with a "
        "window of 20 (a block: 16 tokens, 1 layers)"
    )
    assert shown.count(line) == shown.count("KV cache") == times


def test_a_pipeline_sums_nothing_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(["smollm2-135m", "--tp", "2", "--layout", "pipeline"]) != 0
    assert "--layout pipeline with a rank in each stage sums nothing" in capsys.readouterr().err


def test_sums_inside_the_stages_of_a_pipeline_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tp", "9", "--layout", "pipeline", "--stages", "3", "--device", "cpu")
    assert explain(["random:llama-3.2-1b", *options]) == 0
    assert capsys.readouterr().out.startswith("3 ranks, float32 on cpu over ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "2"], "cannot split model.layers.0.self_attn.o_proj.weight in Q4_K over 2 ranks"),
        (["--tp", "5"], "cannot split 4 query heads over 5 ranks"),
        (
            ["--max-model-len", "513", "--quantization", "none"],
            "--max-model-len 513 exceeds the model's context of 512",
        ),
        (["--activations", "int8", "--quantization", "none"], "--activations int8 is for packed weights"),
        (["--layout", "hybrid", "--kv-offload", "--quantization", "none"], "hybrid does not combine with --kv-offload"),
    ],
)
def test_what_serve_refuses_is_not_explained(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention outputs of one superblock."""
    path = make_tiny_gguf(tmp_path / "m.gguf", "Q4_K", hidden_size=256, intermediate_size=256)
    assert explain([str(path), "--device", "cpu", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_what_rank_0_drafts_with_is_in_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: list[list[int]] = []
    monkeypatch.setattr(run_plan, "describe_nodes", lambda config, device, each: fixed.append(each) or [])
    model, draft = (str(make_tiny(tmp_path / name)) for name in ("m", "d"))
    for options in ([], ["--speculation", "draft", "--draft-model", draft]):
        assert explain([model, "--tp", "2", "--device", "cpu", *options]) == 0
    without, shown = " ".join(capsys.readouterr().out.split()).split("rank 0 drafts with d")
    assert "drafts" not in without.rpartition("speculation:")[0] and "of weights" in shown
    assert fixed[1][0] > fixed[0][0] and fixed[1][1] == fixed[0][1]
    assert explain([model, "--tp", "2", "--device", "cpu", *options, "--json"]) == 0
    [note] = [note for note in json.loads(capsys.readouterr().out)["notes"] if note.startswith("speculation:")]
    assert "rank 0 drafts with d" in note


def _two_nodes() -> tuple[NumaNode, ...]:
    cores = tuple(os.sched_getaffinity(0))
    return tuple(NumaNode(number=n, cores=cores, free_bytes=1 << 40, distances=(10, 21)) for n in range(2))


@pytest.mark.parametrize(
    ("options", "quota", "line"),
    [
        ([], False, "memory and threads by NUMA node: rank 0 on node 0, rank 1 on node 1"),
        (["--numa", "off"], False, ""),
        ([], True, "so ranks are not bound to the 2 NUMA nodes, and read memory of other nodes, which is slower"),
    ],
)
def test_the_nodes_of_ranks(
    options: list[str],
    quota: bool,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_plan, "read_numa_nodes", _two_nodes)
    monkeypatch.setattr(run_plan, "num_cores", lambda: len(os.sched_getaffinity(0)) - quota)
    assert explain([str(make_tiny(tmp_path / "m")), "--device", "cpu", *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (line in shown) if line else "NUMA" not in shown
