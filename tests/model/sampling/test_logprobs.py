import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.model.sampling.logprobs import score_tokens, unpacked_scores
from tightwire.model.sampling.parameters import TokenScore


def scored(logits: torch.Tensor, targets: torch.Tensor, top_n: list[int]) -> list[TokenScore]:
    return unpacked_scores(
        score_tokens(logits, torch.arange(len(logits)), targets, max(top_n), 0, lambda x: [x]).numpy(), top_n
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 20), vocab=st.integers(1, 70), ties=st.booleans())
def test_against_numpy(seed: int, rows: int, vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)  # has both zeros, too
    targets = rng.integers(0, vocab, rows)
    top_n = rng.integers(0, 8, rows).tolist()
    scores = scored(torch.from_numpy(logits), torch.from_numpy(targets), top_n)
    for r, score in enumerate(scores):
        exact = logits[r].astype(np.float64)
        exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        order = np.argsort(-exact, kind="stable").tolist()
        assert score.token_id == targets[r]
        assert score.logprob == pytest.approx(exact[targets[r]], abs=1e-5)
        assert score.rank == order.index(targets[r]) + 1
        assert [token_id for token_id, _ in score.top] == order[: top_n[r]]
        assert [logprob for _, logprob in score.top] == pytest.approx(exact[order[: top_n[r]]].tolist(), abs=1e-5)


def test_rows_do_not_depend_on_each_other() -> None:
    logits = torch.randn(21, 5001, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(21)
    together = scored(logits, targets, [4] * 21)
    alone = [scored(logits[r : r + 1], targets[r : r + 1], [4])[0] for r in range(21)]
    assert together == alone


def test_tokens_without_probability() -> None:
    (score,) = scored(torch.tensor([[0.0, -torch.inf, 1.0]]), torch.tensor([1]), [3])
    assert (score.logprob, score.rank) == (-np.inf, 3)
    assert [token_id for token_id, _ in score.top] == [2, 0, 1]


_SCORE_MANY = """
import re, torch
from tightwire.allocator import keep_freed_memory
from tightwire.model.sampling.logprobs import score_tokens
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
keep_freed_memory()
with torch.inference_mode():
    rows, logits = torch.arange(256), torch.zeros(256, 100_000)
    score_tokens(logits[:8], rows[:8], rows[:8], 5, 0, lambda x: [x])
    before = peak()
    score_tokens(logits, rows, rows, 5, 0, lambda x: [x])
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_scores_take_no_copy_of_the_logits() -> None:
    """The 100 MB of logits, of which parts are scored: pieces of a part that were kept would take as much again."""
    run = subprocess.run([sys.executable, "-c", _SCORE_MANY], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 20
