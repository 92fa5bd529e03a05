"""A model without weights: the next token follows from what the plan says is in the cache, so a wrong plan shows as a
wrong text. Used by the engine's and the scheduler's tests."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from helpers.model.ranked_sampling import choose_alone
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.comm.ledger.ledger import Spent
from tightwire.model.step import StepPlan, ints
from tightwire.server.config.limits import Limits
from tightwire.server.ipc.engine_stats import RankCounts

EMPTY = -1
_GENERATED, _POLICY = 1 << 16, 1 << 17  # beside a token id


def logits_after(context: list[int], vocab_size: int) -> np.ndarray:
    """Normal numbers that depend on every token of ``context`` and its place."""
    digest = hashlib.blake2b(np.array(context, "<i4").tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0.0, 2.0, vocab_size).astype(np.float32)


def greedy_tokens(context: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The most likely tokens after ``context``."""
    tokens = list(context)
    for _ in range(num_tokens):
        tokens.append(int(logits_after(tokens, vocab_size).argmax()))
    return tokens[len(context) :]


class OneRank:
    """The part of ``StepRunner`` that a rank alone does not need: it sends nothing and counts nothing."""

    def choose(self, plans: Sequence[StepPlan], logits_RV: Tensor | None, banned: Sequence[bytes]) -> Tensor | Pending:
        assert logits_RV is not None and not plans[1:]
        return choose_alone(logits_RV, plans[0].sampling, banned[0])

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        pass

    def step_tokens(self) -> int | None:
        return None

    def comm_spent(self) -> Spent:
        return Spent()

    def counts(self) -> RankCounts:
        return RankCounts()


class FakeRunner(OneRank):
    """Keeps one token id per cache slot, as the model keeps keys and values, and checks every plan it gets.

    ``tells_kinds``: what it keeps also depends on the policy, and on whether the row was generated or prompt, as a model's
    does whose kernels and AllReduces differ for these. ``counts_steps``: it has a part in every one.
    """

    def __init__(
        self, limits: Limits, vocab_size: int, *, tells_kinds: bool = False, counts_steps: bool = True
    ) -> None:
        self._limits, self._vocab_size, self._tells_kinds = limits, vocab_size, tells_kinds
        self._counts_steps = counts_steps
        self._slots = np.full((limits.num_blocks, limits.block_size), EMPTY)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        token_ids, query_lens, context_lens = ints(plan.token_ids), ints(plan.query_lens), ints(plan.context_lens)
        if (token_ids < 0).any():
            assert chosen_R is not None, "the plan refers to tokens that nobody has"
            token_ids = np.array([int(chosen_R[-1 - t].clamp(min=0)) if t < 0 else t for t in token_ids])
        tables = ints(plan.block_tables).reshape(len(query_lens), -1)
        self._check(plan, query_lens, context_lens, tables)
        self.plans.append(plan)
        if self._tells_kinds:
            is_generated_T = np.arange(len(token_ids)) < plan.num_decode_rows
            token_ids = token_ids + _GENERATED * is_generated_T + _POLICY * plan.policy
        contexts = self._write(token_ids, query_lens, context_lens, tables)
        rows = [logits_after(contexts[row], self._vocab_size) for row in ints(plan.logit_rows)]
        return torch.from_numpy(np.stack(rows)) if rows else None

    def _write(
        self, token_ids: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray
    ) -> list[list[int]]:
        """Write the new tokens; the context that each of the T rows sees."""
        size, row, contexts = self._limits.block_size, 0, []
        written = set()
        for query_len, context_len, table in zip(query_lens, context_lens, tables, strict=True):
            for position in range(context_len - query_len, context_len):
                slot = table[position // size], position % size
                assert slot not in written, "two sequences write to one slot"
                written.add(slot)
                self._slots[slot] = token_ids[row]
                row += 1
            # Sequence by sequence, as a step may be cut between any two: what one reads another before it has written.
            cached = self._slots[table].reshape(-1)[:context_len].tolist()
            assert EMPTY not in cached, "the plan reads a slot that was never written"
            contexts += [cached[: position + 1] for position in range(context_len - query_len, context_len)]
        assert row == len(token_ids)
        return contexts

    def _check(self, plan: StepPlan, query_lens: np.ndarray, context_lens: np.ndarray, tables: np.ndarray) -> None:
        limits = self._limits
        assert plan.index == len(self.plans) + 1 or not self._counts_steps
        assert query_lens.min() >= 1 and query_lens.sum() <= limits.max_num_batched_tokens
        assert len(query_lens) <= limits.max_num_seqs
        assert context_lens.max() <= limits.max_model_len
        assert tables.min() >= 0 and tables.max() < limits.num_blocks
        held = [table[: limits.blocks_for(n)] for table, n in zip(tables, context_lens, strict=True)]
        # Blocks of guesses that failed are kept for what comes.
        assert 0 <= tables.shape[1] - max(len(blocks) for blocks in held) <= 2, "padded beyond the widest"
        if limits.prefix_cache == "none":
            together = np.concatenate(held)
            assert len(set(together.tolist())) == len(together), "two sequences share a block"
        if limits.max_step_blocks is not None:
            assert len(set(np.concatenate(held).tolist())) <= limits.max_step_blocks, "more blocks than a step may need"
        rows = ints(plan.logit_rows)
        assert (np.diff(rows) > 0).all()


class FakeDraftRunner:
    """A ``DraftRunner`` over a model without weights, whose most likely tokens are those of a ``FakeRunner`` of the same limits."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        self.num_ids, self._runner = vocab_size, FakeRunner(limits, vocab_size, counts_steps=False)
        self.plans = self._runner.plans

    def execute(self, plan: StepPlan, num_ids: int) -> Tensor | None:
        logits_RV = self._runner.execute(plan)
        return None if logits_RV is None else logits_RV[:, :num_ids]
