"""Sampled answers with drafted tokens have the distribution of answers without: the model's own, filtered, place by place."""

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.server.fake_runner import FakeRunner, logits_after

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import Request, RequestRules
from tightwire.server.ipc.messages import AddRequest

VOCAB, PROMPT, NUM_SEEDS = 4, [1, 3, 2], 2400
LIMITS = Limits(max_model_len=32, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=64, block_size=4)


class SecondBest(Drafter):
    """Drafts the likeliest token and then the one after the likeliest, so that many drafts are right for a part only."""

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        text: list[int] = list(request.token_ids)
        for _ in range(max(0, room)):
            text.append(int(np.argsort(logits_after(text, VOCAB))[-1 - len(text) % 2]))
        return text[len(request.token_ids) :]


def shares(text: list[int], temperature: float, top_p: float, min_p: float) -> np.ndarray:
    """The probabilities of the next token after the filters."""
    p_V = np.exp(logits_after(text, VOCAB) / temperature)
    p_V[p_V < min_p * p_V.max()] = 0.0
    p_V /= p_V.sum()
    order = np.argsort(-p_V)
    p_V[order[np.cumsum(p_V[order]) - p_V[order] >= top_p]] = 0.0
    return p_V / p_V.sum()


@pytest.mark.parametrize(("temperature", "top_p", "min_p"), [(1.0, 1.0, 0.0), (1.5, 0.9, 0.0), (2.0, 1.0, 0.2)])
def test_answers_with_drafts_have_the_models_distribution(temperature: float, top_p: float, min_p: float) -> None:
    """All answers of three tokens. Chi-square with at most 63 degrees of freedom exceeds 130 less than once in 10^6."""
    filters: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0)
    engine = Engine(
        runner=FakeRunner(LIMITS, VOCAB),
        sampler=Sampler(VOCAB),
        limits=LIMITS,
        rules=RequestRules(vocab_size=VOCAB, max_model_len=32, eos_token_ids=frozenset()),
        drafter=SecondBest(max_tokens=3, longest=1, shortest=1),
    )
    texts: dict[str, list[int]] = {}
    for seed in range(NUM_SEEDS):
        params = SamplingParams(max_tokens=3, seed=seed, ignore_eos=True, **filters)
        engine.add(AddRequest(str(seed), PROMPT, params))
        while seed % 8 == 7 and engine.has_work():
            for output in engine.step().outputs:
                texts.setdefault(output.id, []).extend(output.token_ids)
    for text in texts.values():
        counts[tuple(text)] += 1
    expected = {
        text: NUM_SEEDS * np.prod([shares([*PROMPT, *text[:place]], **filters)[text[place]] for place in range(3)])
        for text in counts
    }
    assert not any(counts[text] for text in counts if not expected[text])
    usual = [text for text in counts if expected[text] > 5]
    assert sum((counts[text] - expected[text]) ** 2 / expected[text] for text in usual) < 130
    assert sum(expected[text] for text in usual) > 0.9 * NUM_SEEDS
    drafted = engine.stats().counters
    assert 0.1 * drafted.num_draft_tokens < drafted.num_accepted_draft_tokens < 0.9 * drafted.num_draft_tokens
