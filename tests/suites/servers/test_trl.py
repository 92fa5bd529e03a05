"""TRL's GRPOTrainer learns from answers of `tightwire serve`, as ``examples/trl_grpo.py`` does it."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.server.server_process import ServerProcess
from tiny import make_tiny

ROOT = Path(__file__).parents[3]


@pytest.mark.filterwarnings("ignore")
def test_answers_have_the_probabilities_of_trls_newest_adapter(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
    example = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    model, folder = make_tiny(tmp_path / "model", dtype="float32"), tmp_path / "adapters"
    folder.mkdir()
    found: list[tuple[float, int]] = []  # the largest difference of a rollout's log-probabilities, and their number

    class Watched(example["Tightwire"]):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            differences = []
            columns = (output[key] for key in ("prompt_ids", "completion_ids", "logprobs"))
            for prompt, answer, theirs in zip(*columns, strict=True):
                with torch.no_grad():
                    logits = trainer.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
                own = logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
                differences += (own - torch.tensor(theirs)).abs().tolist()
            found.append((max(differences), len(differences)))
            return output

    arguments = ["--port", "0", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
    arguments += ["--lora-dir", str(folder), "--max-loras", "2"]
    with ServerProcess(tmp_path / "temp", str(model), *arguments) as server:
        tightwire = Watched(server.wait_ready(), folder)
        options = {"max_steps": 3, "learning_rate": 1e-2, "bf16": False, "save_strategy": "no"}
        trainer = example["make_trainer"](str(model), tightwire, str(tmp_path / "run"), **options)
        trainer.train()

    assert len(found) >= 3 and all(difference < 1e-4 and number > 8 for difference, number in found)
    assert any(p.abs().max() > 1e-3 for name, p in trainer.model.named_parameters() if "lora_B" in name)
    assert not list(folder.iterdir())  # each version is removed once it is loaded
