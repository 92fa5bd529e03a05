"""What ``tightwire explain`` says beside the AllReduces."""

from pathlib import Path

import pytest
from helpers.model.family_models import make_family_folder

from tightwire.model.families import family_named
from tightwire.server.cli.explain import explain


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
