from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.penalties import PenaltyTables

VOCAB = 12


@dataclass(eq=False)
class Row:
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()


def row(prompt: list[int], output: list[int], **kw: Any) -> Row:
    return Row(SamplingParams(max_tokens=99, **kw), prompt + output, len(prompt))


def reference(logits: np.ndarray, r: Row) -> np.ndarray:
    """Token by token."""
    out, output = logits.astype(np.float64), r.token_ids[r.num_prompt_tokens :]
    for v in range(len(logits)):
        if v in r.token_ids:
            out[v] = out[v] / r.params.repetition_penalty if out[v] > 0 else out[v] * r.params.repetition_penalty
        out[v] -= r.params.frequency_penalty * output.count(v) + r.params.presence_penalty * (v in output)
    return out


_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20)
_penalty = st.sampled_from([-2.0, 0.0, 0.3, 2.0])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(_tokens, _tokens, _penalty, _penalty, st.sampled_from([0.5, 1.0, 1.7])), min_size=1, max_size=11
    ),
    seed=st.integers(0, 1000),
)
def test_against_token_by_token(rows: list[tuple[list[int], list[int], float, float, float]], seed: int) -> None:
    tables = PenaltyTables(VOCAB, torch.device("cpu"))
    held = [
        row(prompt, output, presence_penalty=p, frequency_penalty=f, repetition_penalty=r)
        for prompt, output, p, f, r in rows
    ]
    logits = torch.randn(len(held) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    untouched = logits[0].clone()
    wanted = [reference(logits[i + 1].numpy(), r) for i, r in enumerate(held)]
    got = logits.clone()
    tables.apply_(got.clone(), range(1, len(held) + 1), held)  # asking again must not count again
    tables.apply_(got, range(1, len(held) + 1), held)
    assert torch.equal(got[0], untouched)
    np.testing.assert_allclose(got[1:].numpy(), np.stack(wanted), atol=1e-5)


def test_new_tokens_are_counted() -> None:
    tables = PenaltyTables(VOCAB, torch.device("cpu"))
    r = row([1, 2], [], frequency_penalty=1.0)
    for token_id, count in [(3, 1.0), (3, 2.0), (1, 1.0), (3, 3.0)]:
        r.token_ids.append(token_id)
        logits = torch.zeros(1, VOCAB)
        tables.apply_(logits, [0], [r])
        assert logits[0, token_id] == -count
    assert logits[0].tolist() == [0, -1, 0, -3] + [0] * 8  # the prompt's own 1 and 2 do not count


def test_counts_end_with_their_sequence() -> None:
    tables = PenaltyTables(VOCAB, torch.device("cpu"))
    assert len(tables._counts) == 0
    first, second = row([1], [2, 2], repetition_penalty=2.0), row([4], [5], repetition_penalty=2.0)
    tables.apply_(torch.zeros(2, VOCAB), [0, 1], [first, second])
    assert len(tables._counts) == 2
    tables.release(first)
    tables.release(first)
    assert len(tables._counts) == 1
    third = row([7], [8], repetition_penalty=2.0)
    logits = torch.ones(2, VOCAB)
    tables.apply_(logits, [0, 1], [second, third])
    assert len(tables._counts) == 2
    assert (logits == 0.5).nonzero().tolist() == [[0, 4], [0, 5], [1, 7], [1, 8]]
    tables.release(second)
    tables.release(third)
    assert len(tables._counts) == 0


def test_has_penalties() -> None:
    assert not SamplingParams(max_tokens=1).has_penalties
    assert SamplingParams(max_tokens=1, presence_penalty=-1.0).has_penalties
    assert SamplingParams(max_tokens=1, frequency_penalty=0.1).has_penalties
    assert SamplingParams(max_tokens=1, repetition_penalty=1.1).has_penalties
