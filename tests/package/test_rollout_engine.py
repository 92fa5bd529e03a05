"""Processes of one host that answer prompts together sum through shared memory, and answer as one rank does."""

from pathlib import Path

import pytest
from harness import run_in_process, run_ranks
from helpers.training.rollout_bodies import answer_together
from helpers.training.training_runs import make_prompt_config

_PROMPTS = [([72, 101, 108 + number, 111], number) for number in range(6)]


def test_processes_answer_as_one_rank(tmp_path: Path) -> None:
    reward = "grpo={rewards: ['tightwire.training.data.rewards:json_facts'], answer_tokens: 12}"
    shared = make_prompt_config(tmp_path, reward, "rollout.tp=2")
    whole = make_prompt_config(tmp_path, reward)

    [(alone, none_sent, _)] = run_in_process(1, answer_together, whole, _PROMPTS, 12)
    ranks = run_ranks(2, answer_together, shared, _PROMPTS, 12, timeout_s=120)

    assert none_sent == 0
    for rank, (answers, num_bytes, transport) in enumerate(ranks):
        assert transport == "SharedMemoryTransport" and num_bytes > 0
        assert [len(answer.logprobs) == len(answer.token_ids) > 0 for answer in answers] == [True] * 3
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone[rank::2]]
        for own, theirs in zip(answers, alone[rank::2], strict=True):
            assert own.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
