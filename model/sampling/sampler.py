"""Rank 0's part in choosing tokens: turns sequences into rows for all ranks (``rows``), and their results into tokens."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.kernels.transfer import Download
from tightwire.model.sampling.draw import MAX_VOCAB_SIZE, hashed, mix_seed, steps_of
from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.sampling.logprobs import unpacked_scores
from tightwire.model.sampling.parameters import SamplingRow, TokenScore
from tightwire.model.sampling.rows import Column, SampleRows, packed_edits, sampled_row, scored_row


class Wanted(NamedTuple):
    """What one sequence wants from a step, in the order of its rows of logits: scores of prompt tokens, then tokens."""

    row: SamplingRow
    targets: Sequence[int] = ()  # prompt tokens, one for each row that scores one
    samples: bool = True
    draft: Sequence[int] = ()  # guesses of the next tokens; the row behind each chooses the token after it

    @property
    def num_chosen(self) -> int:
        return 1 + len(self.draft) if self.samples else 0


class Sampled(NamedTuple):
    """The chosen tokens, one entry per row; negative if there is none (``TokenChooser.choose``)."""

    token_ids: list[int]
    scores: list[TokenScore | None]  # None if params.logprobs is None


class Choice:
    """Tokens that are being chosen on the device. The next step can use ``ids_R``, int32, before ``wait``."""

    def __init__(self, results: Tensor | Pending, rows: Sequence[SampleRows]) -> None:
        """``results``: those of ``TokenChooser.choose`` for each of ``rows``, one after the other; on their way in a pipeline."""
        self._rows, self._coming = rows, results if isinstance(results, Pending) else None
        if isinstance(results, Tensor):
            self.ids_R, self._download = results[: len(rows[0].table_RC)].int(), Download([results])

    @property
    def has_come(self) -> bool:
        """False if ``wait`` waits for another rank."""
        return self._coming is None or self._coming.done.done()

    def wait(self) -> Sampled:
        """Wait for the device and return the tokens."""
        sampled = Sampled([], [])
        results = self._download.wait()[0] if self._coming is None else self._coming.wait()
        numbers, start = results.numpy(), 0
        for rows in self._rows:
            num_rows, stop = len(rows.table_RC), start + rows.num_results
            scores: list[TokenScore | None] = [None] * num_rows
            top_n = rows.column(Column.TOP_N)[rows.scored].astype(int).tolist()
            scored_RC = numbers[start + num_rows : stop].reshape(len(top_n), 3 + 2 * rows.num_top)
            for row, score in zip(rows.scored, unpacked_scores(scored_RC, top_n), strict=True):
                scores[row] = score
            sampled.token_ids.extend(numbers[start : start + num_rows].tolist())
            sampled.scores.extend(scores)
            start = stop
        return sampled


class Sampler:
    """Holds what sequences need from step to step: hashed seeds, counts of tokens, banned tokens, grammars."""

    def __init__(self, vocab_size: int, grammars: GrammarMasks | None = None) -> None:
        """``grammars``: None: no row has a grammar."""
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"the sampler handles vocabularies of 1 to {MAX_VOCAB_SIZE} tokens, got {vocab_size}")
        self._vocab_size, self.grammars = vocab_size, grammars
        self._states: dict[int, _State] = {}  # by id() of the row

    def rows(self, wanted: Sequence[Wanted]) -> SampleRows:
        """Return the rows of a step. The last of a sequence's ``token_ids`` may be deferred unless ``params.needs_tokens``."""
        table, draws, bias, counts = [], [], [], []
        for row, targets, samples, draft in wanted:
            state, params = self._state(row), row.params
            table += [scored_row(target, params.prompt_logprobs or 0) for target in targets]
            draws += [(0, 0)] * len(targets)
            num_output = len(row.token_ids) - row.num_prompt_tokens
            for place in range(num_output, num_output + 1 + len(draft)) if samples else ():
                if params.logit_bias:
                    bias.append((len(table), state.bias_ids, state.bias))
                if place < params.min_tokens:
                    bias.append((len(table), state.stop_ids, -np.inf))
                if params.has_penalties:
                    counts.append((len(table), *state.counted(draft[: place - num_output])))
                table.append(state.numbers)
                draws.append((state.stream, place))
        table_RC = np.array(table, np.float64).reshape(-1, len(Column))
        stream_R, place_R = np.array(draws, np.int64).reshape(-1, 2).T
        table_RC[:, Column.NOISE] = hashed(stream_R + steps_of(place_R)).view(np.float64)
        return SampleRows(table_RC.tobytes(), packed_edits(bias), packed_edits(counts))

    def banned(self, wanted: Sequence[Wanted]) -> bytes:
        """Return ``TokenChooser.choose``'s banned tokens of the rows with masks. Waits for the grammars' masks."""
        return b"".join(
            np.packbits(banned_V).tobytes()
            for each in wanted
            if each.samples and each.row.params.has_mask
            for banned_V in self._banned(each)
        )

    def release(self, row: SamplingRow) -> None:
        """Drop the state of a sequence that ended."""
        self._states.pop(id(row), None)
        if self.grammars is not None:
            self.grammars.release(row)

    def _banned(self, wanted: Wanted) -> Iterable[np.ndarray]:
        row, _, _, draft = wanted
        always_V, params = self._state(row).banned_V, row.params
        assert always_V is not None, "a row with a mask"
        by_grammar = None
        if params.grammar:
            assert self.grammars is not None, "the engine accepts no grammar without GrammarMasks"
            by_grammar = self.grammars.banned(row, draft)
        for num_drafted in range(wanted.num_chosen):
            banned_V = always_V.copy() if by_grammar is None else always_V | by_grammar[num_drafted]
            output = [*row.token_ids[row.num_prompt_tokens :], *draft[:num_drafted]]
            for word, own in self._state(row).words:
                if seen := [*takewhile(own.__contains__, islice(reversed(output), len(word.steps) - 1))]:
                    banned_V[word.ends_after(seen[::-1])] = True
            yield banned_V

    def _state(self, row: SamplingRow) -> "_State":
        if id(row) not in self._states:
            self._states[id(row)] = _State(row, self._vocab_size)
        return self._states[id(row)]


class _State:
    """What one sequence needs from step to step. A penalized one takes about 12 bytes for each different token."""

    def __init__(self, row: SamplingRow, vocab_size: int) -> None:
        params = row.params
        self._row = row  # kept alive, so that no other object gets its id()
        self.stream = mix_seed(params.seed)
        self.numbers = sampled_row(params, vocab_size)
        self.bias_ids, self.bias = np.array([*params.logit_bias]), np.array([*params.logit_bias.values()])
        self.stop_ids = np.array([*row.stop_ids])
        # With the ids in each: only tokens behind the last other one can be its beginning, and few words have any.
        self.words = [(word, frozenset(chain.from_iterable(word.steps))) for word in params.bad_words]
        self.banned_V: np.ndarray | None = None
        if params.has_mask:
            self.banned_V = np.full(vocab_size, params.allowed_token_ids is not None)
            self.banned_V[[*(params.allowed_token_ids or ())]] = False
            for word, _ in self.words:
                self.banned_V[word.whole] = True
        self._counts: dict[int, int] = {}  # tokens of prompt and output, and how often each is in the output
        self._num_counted = 0

    def counted(self, draft: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the different tokens so far, with ``draft`` behind them, and how often each is in the output."""
        tokens, counts, num_prompt = self._row.token_ids, self._counts, self._row.num_prompt_tokens
        for place in range(self._num_counted, len(tokens)):
            counts[tokens[place]] = counts.get(tokens[place], 0) + (place >= num_prompt)
        self._num_counted = len(tokens)
        if draft:
            counts = counts.copy()
            for token_id in draft:
                counts[token_id] = counts.get(token_id, 0) + 1
        return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))
