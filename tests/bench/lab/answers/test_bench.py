"""The default configuration answers as the model itself does, at an uneven split; what the bench computes, and its errors.

The servers run with the settings of `make serve`, on real weights. The whole measurement, over 100 prompts, stands in
bench/RESULTS.md.
"""

import json
import math
from pathlib import Path

import httpx
import pytest
import torch
from helpers.server.server_process import ServerProcess
from transformers import PreTrainedModel

from tightwire.bench import cli
from tightwire.bench.lab.answers.bench import (
    Answer,
    Compared,
    answer,
    compare,
    divergence,
    float32_model,
    read_prompts,
    summary,
)
from tightwire.model.open import open_checkpoint
from tightwire.remote import RemoteError, connect

_PROMPTS, _TOKENS, _EVERY = 8, 8, 4
_MOST_KL = 5e-4  # nats: half of what sums and a residual in bfloat16 cost


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return float32_model(open_checkpoint("smollm2-135m"))


@pytest.fixture(scope="module")
def references(model: PreTrainedModel) -> list[Answer]:
    return answer(model, read_prompts(open_checkpoint("smollm2-135m").tokenizer(), _PROMPTS), _TOKENS)


def test_the_default_gives_the_answers_of_the_model_in_float32(references: list[Answer], tmp_path: Path) -> None:
    """At an uneven split: five query heads and four, and a KV head that both ranks have."""
    with ServerProcess(tmp_path / "server", "smollm2-135m", "--tp", "2", "--port", "0") as server:
        remote = connect(server.wait_ready())
        cell = summary("", [found for each in references for found in compare(remote, each, _EVERY)])
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        text = httpx.post(f"{remote.base}/chat/completions", json=chat, timeout=60, trust_env=False).json()
    assert cell["first_clear_equal"] == 1.0
    assert cell["kl"] < _MOST_KL
    assert text["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_prompts_are_half_chat_and_half_text() -> None:
    prompts = list(read_prompts(open_checkpoint("smollm2-135m").tokenizer(), 100))
    assert len(prompts) == len(set(prompts)) == 100
    assert prompts[0] == "What is the capital of France?" and prompts[50] == "The capital of France is"


def test_divergence_counts_what_is_not_reported_as_one_token() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.4, 0.4, 0.15, 0.05])
    logs = [{0: math.log(each[0]), 1: math.log(each[1])} for each in (p, q)]
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.2)
    assert divergence(*logs) == pytest.approx(expected, abs=1e-6)
    assert divergence(logs[0], logs[0]) == 0
    assert divergence(*logs) <= float((p * (p / q).log()).sum())


def test_answers_computed_together_are_those_of_each_alone(model: PreTrainedModel, references: list[Answer]) -> None:
    (alone,) = answer(model, {"": references[5].prompt_ids}, _TOKENS)
    assert alone.token_ids == references[5].token_ids
    assert (alone.log_probs_TV - references[5].log_probs_TV).abs().max() < 1e-3


def test_an_answer_is_equal_if_all_its_tokens_are() -> None:
    found = [
        Compared(*each) for each in (("a", 0, 0.1, True, True), ("a", 1, 0.2, False, True), ("b", 0, 0.3, True, False))
    ]
    cell = summary("mine", found)
    assert (cell["answers_equal"], cell["first_equal"], cell["contexts"]) == (0.5, 1, 3)
    assert cell["equal"] == pytest.approx(2 / 3) and cell["kl"] == pytest.approx(0.2)
    assert cell["first_clear_equal"] == 1 and summary("mine", found[2:])["first_clear_equal"] is None  # none is clear


def test_a_server_that_does_not_answer_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "answers", "--servers", "mine=http://127.0.0.1:9"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "127.0.0.1:9" in error and "--servers" in error and "--url" not in error


@pytest.mark.parametrize("servers", ["http://127.0.0.1:8000", "mine=127.0.0.1:8000", "=http://127.0.0.1:8000"])
def test_a_server_needs_a_name_and_a_url(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["lab", "answers", "--servers", servers])
    assert exit.value.code == 2
    assert "takes NAME=URL" in capsys.readouterr().err


def test_an_unknown_host_is_an_error() -> None:
    with pytest.raises(RemoteError):
        connect("http://127.0.0.1:9")
