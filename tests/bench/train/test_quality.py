"""The summary of compressed training against dense training; an interrupted arm continues and a finished one is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightwire.bench.train import quality
from tightwire.training.config.compression import DenseOptions, QuantizedOptions
from tightwire.training.run.evaluate import Evaluator

_TINY = (
    "model.shape={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}",
    "data.sequence_tokens=8",
    "data.held_out=0.5",
    "batch={sequences: 4, micro_sequences: 1}",
    "schedule={steps: 4, warmup_steps: 1}",
    "evaluation={every: 4, sequences: 4}",
    "checkpoint.every=1",  # each waits for the one before it, so that of step 2 is whole at step 4
)


def test_an_arm_is_compared_with_the_dense_run_of_its_seed() -> None:
    def curve(arm: str, seed: int, held_out: float, finished: bool = True) -> dict[str, Any]:
        logged = {"losses": [3.0, 1.0], "held_out": [9.0, held_out], "wire_bytes": 1000.0}
        return {"arm": arm, "seed": seed, "finished": finished, **logged}

    curves = [
        *(curve("sgd", 0, 2.0), curve("sgd", 1, 4.0), curve("zero3", 0, 1.0)),
        *(curve("dgc", 0, 2.2), curve("dgc", 1, 4.8), curve("dgc", 2, 7.0, finished=False)),
    ]
    rows = quality.summarize(curves)

    assert [row["arm"] for row in rows] == ["zero3", "sgd", "dgc"]
    assert rows[2]["behind"] == pytest.approx([0.1, 0.2]) and rows[2]["dense"] == "sgd"
    assert [column.text(rows[2]) for column in quality.COLUMNS] == [
        *("dgc", "2", "3.5000 (2.2000 to 4.8000)", "2.0000", "+15.00% (+10.00% to +20.00%)", "1,000")
    ]


@pytest.mark.parametrize(
    ("arm", "first", "fifth", "last"),
    [
        ("dgc", 0.75, 0.996, 0.999),
        ("no-correction", 0.75, 0.996, 0.999),
        ("dense-start", None, 0.996, 0.999),
        ("no-warm-up", 0.999, 0.999, 0.999),
    ],
)
def test_sparsity_reaches_its_maximum_after_a_fifth_of_the_steps(
    tmp_path: Path, arm: str, first: float | None, fifth: float, last: float
) -> None:
    between = quality.make_config(arm, 0, tmp_path, ["schedule={steps: 100, warmup_steps: 10}"]).parallel.between
    assert not isinstance(between, (DenseOptions, QuantizedOptions))
    assert [between.sparsity_at(step) for step in (0, 19, 20, 99)] == [first, fifth, last, last]


def test_an_interrupted_arm_continues_and_a_finished_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i} of many, {i * i}" for i in range(40)))
    tiny = [*_TINY, f"data.files=[{text}]", "parallel.between.dense_below=64"]
    config = quality.make_config("dgc", 3, tmp_path, tiny)
    log = Path(config.run) / "metrics.jsonl"

    def fail(_: Evaluator) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no more"):
        patch.setattr(Evaluator, "run", fail)
        quality.train(config)
    assert not quality.read_curve(log.parent)["finished"]
    begun = log.read_text().splitlines()[:2]
    quality.train(config)
    assert log.read_text().splitlines()[:2] == begun  # times too: these steps were not made again

    made = log.read_bytes()
    quality.train(config)
    assert log.read_bytes() == made
    assert [row["arm"] for row in quality.report(tmp_path).rows] == ["dgc"]
    (run,) = json.loads((tmp_path / "training-quality.json").read_text())["runs"]
    assert (run["arm"], run["seed"], run["finished"]) == ("dgc", 3, True)
    assert run["steps"] == [1, 2, 3, 4] and run["evaluated_steps"] == [4]
    with pytest.raises(ValueError, match="holds a run with other values"):
        quality.train(quality.make_config("dgc", 3, tmp_path, [*tiny, "optimizer.lr=0.7"]))
