"""Measures every arm at one world size against the exact model: scores of all windows, noise by layer, greedy texts.

With logits l (exact) and m (arm), exact distribution p and d = m - l,

    KL(p || q) = log sum p e^d - sum p d = log1p(sum p expm1(d - c)),  c = sum p d.

This form stays accurate when q is close to p, unlike the difference of two logarithms; equal logits give 0.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightwire.bench.quality.arms import LOSSY_SITES, Arm, exact_arm
from tightwire.bench.quality.noise import NoiseRecord, Power
from tightwire.bench.quality.ranks import (
    NEW_TOKENS,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    PlayedRanks,
    first_differences,
    generate,
)
from tightwire.bench.quality.setting import Windows

_ROWS = 128  # rows whose logits one thread keeps in memory at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One number per position: negative log likelihood of the next token, KL (both nats), equal top token."""

    nll_T: Floats
    kl_T: Floats
    same_top_T: Floats  # 0 or 1


class Scorer:
    """Compares final hidden states through the model's head. Each thread of ``pool`` uses one torch thread."""

    def __init__(self, head_VD: Tensor, pool: ThreadPoolExecutor) -> None:
        self._head_DV, self._pool = head_VD.T, pool

    def score(
        self, exact_TD: Tensor, others: Mapping[str, Tensor], next_ids_T: Tensor
    ) -> tuple[Scores, dict[str, Scores]]:
        """Return the scores of the exact states and of each arm's; ``next_ids_T`` are the true next tokens."""
        starts = range(0, len(exact_TD), _ROWS)
        parts = list(self._pool.map(lambda at: self._score_rows(exact_TD, others, next_ids_T, at), starts))
        return (
            _joined([exact for exact, _ in parts]),
            {name: _joined([scores[name] for _, scores in parts]) for name in others},
        )

    @torch.inference_mode()
    def _score_rows(
        self, exact_TD: Tensor, others: Mapping[str, Tensor], next_ids_T: Tensor, start: int
    ) -> tuple[Scores, dict[str, Scores]]:
        rows = slice(start, start + _ROWS)
        next_ids_R1 = next_ids_T[rows].long().unsqueeze(1)
        exact_RV = exact_TD[rows].float() @ self._head_DV
        log_sum_R = exact_RV.logsumexp(1)
        p_RV = (exact_RV - log_sum_R.unsqueeze(1)).exp_()
        top_R = exact_RV.argmax(1)
        nll_R = log_sum_R - exact_RV.gather(1, next_ids_R1).squeeze(1)
        scores: dict[str, Scores] = {}
        for name, hidden_TD in others.items():
            other_RV = hidden_TD[rows].float() @ self._head_DV
            same_R = other_RV.argmax(1) == top_R
            d_RV = other_RV.sub_(exact_RV)
            next_d_R = d_RV.gather(1, next_ids_R1).squeeze(1)
            center_R = torch.linalg.vecdot(p_RV, d_RV)
            kl_R = torch.linalg.vecdot(p_RV, d_RV.sub_(center_R.unsqueeze(1)).expm1_()).double().log1p()
            # log sum e^m = log sum e^l + c + KL
            other_nll_R = nll_R.double() + center_R.double() + kl_R - next_d_R.double()
            scores[name] = _scores(other_nll_R, kl_R.clamp_min(0), same_R)
        return _scores(nll_R, torch.zeros_like(nll_R), torch.ones_like(nll_R)), scores


def _scores(nll_R: Tensor, kl_R: Tensor, same_R: Tensor) -> Scores:
    return Scores(nll_T=nll_R.double().numpy(), kl_T=kl_R.double().numpy(), same_top_T=same_R.double().numpy())


def _joined(parts: Sequence[Scores]) -> Scores:
    return Scores(
        nll_T=np.concatenate([part.nll_T for part in parts]),
        kl_T=np.concatenate([part.kl_T for part in parts]),
        same_top_T=np.concatenate([part.same_top_T for part in parts]),
    )


@dataclass(kw_only=True, slots=True)
class Measured:
    """The results so far. Lists have one entry per batch of windows; ``scores`` includes the exact model."""

    world_size: int
    scores: dict[str, list[Scores]] = field(default_factory=dict)
    same_tokens: dict[str, list[int]] = field(default_factory=dict)  # length of the equal prefix of each greedy text
    noise: dict[tuple[str, str, int], Power] = field(default_factory=dict)  # by (algorithm, site, layer)

    def joined(self, name: str, what: Callable[[Scores], Floats]) -> Floats:
        return np.concatenate([what(scores) for scores in self.scores[name]])


class NotFiniteError(ValueError):
    """A model's hidden states overflowed, so they cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measures all arms at one world size; calls ``told`` with the name of each step before it begins."""

    ranks: PlayedRanks
    windows: Windows
    arms: Sequence[Arm]
    scorer: Scorer
    batch: int
    told: Callable[[str], None]

    def run(self, measured: Measured) -> Iterator[None]:
        """Fill ``measured``; yield after each step whose results are worth saving."""
        self._noise(measured)
        self.ranks.give_arms([exact_arm(), *self.arms])
        yield
        for numbers in batches(self.windows.judged, self.batch):
            self._windows(measured, numbers)
            yield
        self._greedy(measured)
        yield

    @property
    def num_steps(self) -> int:
        """The number of calls of ``told``."""
        num_batches = -(-len(self.windows.judged) // self.batch)
        return 1 + num_batches * (len(self.arms) + 2) + len(self.arms) + 1

    def seconds_left(self) -> float:
        """Estimate the time of all batches by running one extra pass; call after the first yield."""
        numbers = self.windows.judged[: self.batch]
        began = time.monotonic()
        states_TD = self.windows.scored(self.ranks.prefill(self.windows.token_ids_NL[list(numbers)], 0))
        self.scorer.score(states_TD, {}, self.windows.next_ids(numbers))
        per_pass_s = time.monotonic() - began
        return per_pass_s * (len(self.arms) + 1) * -(-len(self.windows.judged) // self.batch)

    def _noise(self, measured: Measured) -> None:
        self.told("noise of each layer")
        numbers = self.windows.judged[: self.batch]
        measured.noise = noise_of_arms(self.ranks, self.windows, numbers, self.arms)

    def _windows(self, measured: Measured, numbers: Sequence[int]) -> None:
        token_ids_BL = self.windows.token_ids_NL[list(numbers)]
        states = {}
        for number, name in enumerate([exact_arm().name, *(arm.name for arm in self.arms)]):
            self.told(name)
            states[name] = self.windows.scored(self.ranks.prefill(token_ids_BL, number))
            if not states[name].isfinite().all():
                raise NotFiniteError(f"{name} with {self.ranks.world_size} ranks: hidden states are not finite")
        self.told("comparing")
        exact, others = self.scorer.score(states.pop(exact_arm().name), states, self.windows.next_ids(numbers))
        for name, scores in {exact_arm().name: exact, **others}.items():
            measured.scores.setdefault(name, []).append(scores)

    def _greedy(self, measured: Measured) -> None:
        length = min(PROMPT_TOKENS, self.windows.token_ids_NL.shape[1])
        prompts_BL = self.windows.token_ids_NL[spread(self.windows.judged, NUM_PROMPTS), :length]
        self.told("greedy texts")
        exact_BT = generate(self.ranks, prompts_BL, 0, NEW_TOKENS)
        for number, arm in enumerate(self.arms, start=1):
            self.told(f"greedy texts: {arm.name}")
            other_BT = generate(self.ranks, prompts_BL, number, NEW_TOKENS)
            measured.same_tokens[arm.name] = first_differences(exact_BT, other_BT)


def batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the numbers, evenly spaced."""
    count = min(most, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def noise_of_arms(
    ranks: PlayedRanks, windows: Windows, numbers: Sequence[int], arms: Sequence[Arm]
) -> dict[tuple[str, str, int], Power]:
    """Measure the noise of each algorithm that an arm uses for prompt rows, at every site and layer."""
    places = [(site, layer) for site in LOSSY_SITES for layer in range(ranks.num_layers)]
    names = dict.fromkeys(arm.algorithm(*place) for arm in arms for place in places)
    record = NoiseRecord(ranks.world_size, list(names))
    ranks.give_arms([exact_arm()], record.routes)
    ranks.prefill(windows.token_ids_NL[list(numbers)], 0)
    return record.powers


def make_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "score", initializer=torch.set_num_threads, initargs=(1,))
