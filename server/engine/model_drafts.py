"""Drafts what a small model of the same vocabulary finds most likely, and behind it what the text has, as many tokens as pay.

A drafted token costs a pass of the small model. After each one it is decided whether another pays, by how sure the model was so far:
while tokens expected a second rise. Where the text itself goes on as it did before, its tokens cost nothing and the model is not asked.
A pass may choose among the first ids of the vocabulary only, the more frequent ones (FR-Spec, arXiv 2502.14856): the head's other
rows are not read, and their tokens not guessed.
"""

import math
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.model.step import make_plan
from tightwire.server.config.limits import Limits
from tightwire.server.engine.draft_runner import DraftRunner
from tightwire.server.engine.drafts import SUFFIX, WEIGHT, Drafter, RowTimes
from tightwire.server.engine.request import Request
from tightwire.server.engine.sequences import Sequences
from tightwire.server.engine.step_builder import Chunk, StepBuilder, make_step
from tightwire.server.ipc.engine_stats import EngineCounters

_MOST_TOKENS = 16  # of one draft by the model
_LEAST_CHANCE = 0.2  # that all tokens of a draft are right: below, the model is not asked to go on with it
_PAID_IN = 32  # steps, in which drafts must regain the time of the prompts that the model lacks
_TRY_EVERY = 64  # steps, after which the model is asked even if that did not pay
_NUM_CLASSES = 8  # of tokens by the probability that the model gave them: below 1/2, 3/4, 7/8 and so on
# A pass chooses among the vocabulary's ids up to one of these parts. At first so many tokens are taken to be there.
_HEADS, _FIRST_COVERED = (1, 2, 4, 8), (1.0, 0.96, 0.91, 0.85)
_FIRST_RATE = 0.75  # the share of tokens taken to be right before any was checked


@dataclass(eq=False, slots=True)
class _Draft:
    """One sequence's: the model's tokens with their classes, and the text's behind them. ``odds``: that each is right with those before."""

    room: int  # for tokens in all
    most: int = 0  # of the model's tokens
    token_ids: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    text_odds: list[float] = field(default_factory=list)
    chance: float = 1.0  # that all of the model's tokens are right


class ModelDrafter(Drafter):
    """Drafts on rank 0 alone, for all sequences of a step together.

    The model's cache is its own. It computes what it lacks of a sequence with the first draft that pays, of prompts at most a step's
    tokens at a time, and what was wrong is overwritten.
    """

    def __init__(self, runner: DraftRunner, limits: Limits, vocab_size: int, num_replicas: int = 1) -> None:
        """``limits`` and ``vocab_size``: the target's, which may have fewer or more ids for padding. It has the blocks of all replicas."""
        super().__init__(**SUFFIX)
        self._runner, self._vocab_size, self._num_ids = runner, vocab_size, runner.num_ids
        # The numbers of ids that a pass may choose among, its seconds with each, and the share of tokens that are there.
        self._sizes_H = np.array([self._num_ids, *(self._num_ids // each // 16 * 16 for each in _HEADS[1:])])
        self._head_s_H, self._covered_H = np.zeros(len(_HEADS)), np.array(_FIRST_COVERED)
        same, num_blocks = ("max_num_seqs", "max_num_batched_tokens", "block_size"), limits.num_blocks * num_replicas
        given = {name: getattr(limits, name) for name in same}
        # Windows may let the target hold longer sequences in as many blocks; the model drafts for those that it can hold.
        given["max_model_len"] = min(limits.max_model_len, num_blocks * limits.block_size)
        shared = "none" if limits.prefix_cache == "none" else "prompts"
        self._limits = Limits(**given, num_blocks=num_blocks, prefix_cache=shared)
        self._sequences = Sequences(self._limits, EngineCounters())
        self._own: dict[Request, Request] = {}  # the sequences as its cache has them
        self._drafts: dict[Request, _Draft] = {}
        self._token_times, self._spent_s = RowTimes(), 0.0
        self._rates = [1 - (1 - _FIRST_RATE) * 2.0 ** (1 - each) for each in range(_NUM_CLASSES)]
        self._rate = _FIRST_RATE  # of all classes
        self._num_unasked = 0  # steps

    def measure(self) -> None:
        """Time the model's steps of one row and of many, and each head, so that no request waits to learn what does not pay."""
        most = min(self._limits.max_num_seqs, self._limits.max_drafting_seqs, self._limits.num_blocks)
        for number, num in [(0, most), *((each, 1) for each in range(len(_HEADS)))] * 3:
            rows: dict[str, Any] = dict.fromkeys(("token_ids", "query_lens", "context_lens"), [1] * num)
            rows |= {"block_tables": np.arange(num)[:, None], "num_decode_rows": num, "logit_rows": range(num)}
            start_s = perf_counter()
            logits_RV = self._runner.execute(make_plan(**rows), int(self._sizes_H[number]))
            assert logits_RV is not None
            logits_RV[:1].cpu()  # waits for the device
            seconds = perf_counter() - start_s
            if num == 1:
                self._head_s_H[number] = min(seconds, self._head_s_H[number] or seconds)
            if not number:
                self._token_times.learn(num, seconds)

    def prepare(self, requests: Sequence[Request], num_rows: int, num_seqs: int) -> None:
        start_s, spent_s, self._base = perf_counter(), 0.0, (num_rows, num_seqs)
        longest, self._drafts = self._limits.max_model_len, {}
        for request, own in list(self._own.items()):
            # It has ended, was preempted, or is too long.
            if own.epoch != request.epoch or len(request.token_ids) >= longest:
                self._sequences.remove(self._own.pop(request))
        for each in requests:
            room = each.params.max_tokens - each.num_output_tokens - 1  # an answer's last token is chosen, not computed
            draft = self._drafts[each] = _Draft(room, min(room, longest - len(each.token_ids)))
            if draft.most > 0 and (own := self._own.get(each) or self._follow(each)).in_prompt:
                self._sequences.advance(own)
        self._follow_text(requests, spent_s)
        tokens_H = 1 + self._rate * self._covered_H
        self._size = int(self._sizes_H[np.argmax(tokens_H / (self.times.of(num_rows) + self._head_s_H))])
        for number in range(_MOST_TOKENS if num_rows <= 2 * num_seqs else 0):  # no long prompt waits for the model
            if not (asked := self._worth_asking(number, spent_s) or self._tried(number)):
                break
            spent_s += float(self._token_times.of(len(asked)))
            self._ask(asked)
            self._follow_text(asked, spent_s)
        self._spent_s += perf_counter() - start_s

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        draft, room = self._drafts.get(request, _Draft(0)), max(0, room)
        request.draft_classes = draft.classes[:room]
        return [*draft.token_ids, *draft.text][:room]

    def learn(self, request: Request, num_drafted: int, num_right: int, chosen: Sequence[int]) -> None:
        for token_id in chosen:
            self._covered_H += WEIGHT / 4 * ((token_id < self._sizes_H) - self._covered_H)
        num = len(classes := request.draft_classes)
        for place, each in enumerate(classes[: num_right + 1]):
            self._rates[each] += WEIGHT / 2 * ((place < num_right) - self._rates[each])
            self._rate += WEIGHT / 2 * ((place < num_right) - self._rate)
        if num_right >= num:
            super().learn(request, num_drafted - num, num_right - num, chosen)

    def time(self, chunks: Iterable[Chunk], seconds: float) -> None:
        super().time(chunks, seconds - self._spent_s)
        self._spent_s = 0.0

    def _totals(self, asked: Container[Request] = ()) -> tuple[int, float]:
        """The step's rows, and the tokens expected from it. Behind the drafts of those ``asked`` for is nothing of the text."""
        rows, tokens = self._base
        for request, draft in self._drafts.items():
            rows += len(draft.token_ids) + (0 if request in asked else len(draft.text))
            tokens += sum(draft.odds) + (0 if request in asked else sum(draft.text_odds))
        return rows, tokens

    def _follow_text(self, requests: Iterable[Request], spent_s: float) -> None:
        """Let the text's tokens follow each draft, as many as pay."""
        for request in requests:
            draft = self._drafts[request]
            found, odds = self.search(request, min(self.max_tokens, draft.room - len(draft.token_ids)), draft.token_ids)
            odds = np.multiply(draft.chance, odds).tolist()
            num = self.best_length(odds, *self._totals([request]), spent_s)
            draft.text, draft.text_odds = found[:num], odds[:num]

    def _worth_asking(self, number: int, spent_s: float) -> list[Request]:
        """The sequences whose next token the model drafts; none if the step as it is makes more a second.

        What it lacks of them must pay too: if it does not, the half that it lacks most of is left out.
        """
        more_M = np.arange(1, _MOST_TOKENS - number + 1)
        chances_M = np.cumsum(self._rate**more_M)  # tokens expected from so many more
        drafts = {
            request: draft
            for request, draft in self._drafts.items()
            if len(draft.token_ids) == number < draft.most
            and draft.chance >= _LEAST_CHANCE
            and draft.chance * chances_M[-1] > sum(draft.text_odds)
        }
        rows, tokens = self._totals()
        rate = tokens / (self.times.of(rows) + spent_s)
        asked, next_key = sorted(drafts, key=self._num_lacking), self._sequences.prefixes.next_key
        num_near = sum(self._num_lacking(each) <= 2 * _MOST_TOKENS for each in asked)
        while asked:
            # Of those that wait for one block, one is computed.
            lacking = {next_key(self._own[each]) or each: self._num_lacking(each) for each in asked}
            rows, tokens = self._totals(asked)
            seconds_M = self.times.of(rows + len(asked) * more_M) + spent_s + self._token_times.of(len(asked)) * more_M
            seconds_M += np.diff(self._token_times.of([1, 1 + sum(lacking.values())])) / _PAID_IN
            rates_M = (tokens + sum(drafts[each].chance for each in asked) * chances_M) / seconds_M
            if rates_M.max() > rate:
                break
            asked = asked[: num_near + (len(asked) - num_near) // 2] if len(asked) > num_near else []
        return asked

    def _tried(self, number: int) -> list[Request]:
        """The sequence that the model lacks least of, after many steps without a draft: it may have become right, or faster."""
        self._num_unasked = 0 if number else self._num_unasked + 1
        if self._num_unasked < _TRY_EVERY:
            return []
        return sorted((each for each, draft in self._drafts.items() if draft.most > 0), key=self._num_lacking)[:1]

    def _num_lacking(self, request: Request) -> int:
        """The number of its tokens that the model has not computed."""
        return len(request.token_ids) - self._own[request].num_computed

    def _follow(self, request: Request) -> Request:
        """The draft model's sequence, with the tokens that the request and its draft have now."""
        token_ids = request.token_ids + self._drafts[request].token_ids
        if self._num_ids < self._vocab_size and max(token_ids) >= self._num_ids:  # prompts of ids have those of padding
            token_ids = [min(each, self._num_ids - 1) for each in token_ids]
        if (own := self._own.get(request)) is None:
            given = request.id, request.params, list(token_ids), request.num_prompt_tokens, request.stop_ids
            own = self._own[request] = Request(*given, 0.0, cache_salt=request.cache_salt, epoch=request.epoch)
            self._sequences.running.append(own)
        same = max(0, len(own.token_ids) - _MOST_TOKENS)
        while own.token_ids[same : same + 1] == token_ids[same : same + 1] != []:
            same += 1
        own.token_ids[same:] = token_ids[same:]
        own.num_computed = min(own.num_computed, same, len(token_ids) - 1)
        return own

    def _ask(self, asked: Sequence[Request]) -> None:
        """Add the model's next token to each draft. One that lacks blocks, or more than a step of its prompt, gets none."""
        owns = {self._follow(request): request for request in asked}
        lengths = {own: len(own.token_ids) for own in owns}
        for number in range(2):  # the second for what is behind a prompt
            step, started = StepBuilder(self._limits, self._limits.max_num_batched_tokens), set[Hashable]()
            for own, length in lengths.items():
                self._sequences.advance(own)
                block = self._sequences.prefixes.next_key(own) or own  # another with the same waits for it
                waits = len(own.token_ids) > length or (number and own.in_prompt) or block in started
                num_tokens = 0 if waits else step.affordable(own)
                if num_tokens and self._sequences.grow(own, num_tokens):
                    step.take(own, num_tokens)
                    started.add(block)
            if not (chunks := step.chunks()):
                return
            start_s = perf_counter()
            logits_RV = self._runner.execute(make_step(number, chunks, self._limits).plan, self._size)
            for chunk in chunks:
                chunk.request.num_computed = chunk.end
                self._sequences.prefixes.enter(chunk.request, chunk.end)
            drafting = [chunk.request for chunk in chunks if chunk.samples]
            for row, own in enumerate(drafting):
                assert logits_RV is not None
                self._take(owns[own], own, logits_RV[row, : self._vocab_size])
            if len(drafting) == sum(chunk.num_rows for chunk in chunks):  # no step that catches up
                self._token_times.learn(len(drafting), perf_counter() - start_s)

    def _take(self, request: Request, own: Request, logits_V: Tensor) -> None:
        """Add the most likely token that the request's grammar allows."""
        draft = self._drafts[request]
        if request.params.grammar and self.grammars is not None:
            banned_V = torch.from_numpy(self.grammars.banned(request, draft.token_ids)[-1][: len(logits_V)])
            logits_V = logits_V.masked_fill(banned_V.to(logits_V.device), -math.inf)
        best, token_id = logits_V.max(-1)
        unlikely = 1 - float((best - logits_V.logsumexp(-1)).exp())
        if not math.isnan(unlikely):  # as after the end of a grammar
            each = min(_NUM_CLASSES - 1, int(-math.log2(max(unlikely, 1e-9))))
            draft.chance *= self._rates[each]
            draft.odds.append(draft.chance)
            draft.classes.append(each)
            draft.token_ids.append(int(token_id))
            own.token_ids.append(int(token_id))
            if int(token_id) in request.stop_ids:
                draft.room = draft.most = len(draft.token_ids)
