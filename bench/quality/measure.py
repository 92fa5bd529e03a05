"""Measures every arm at one world size against the exact model: scores of all windows, noise by layer.

With logits l (exact) and m (arm), exact distribution p and d = m - l,

    KL(p || q) = log sum p e^d - sum p d = log1p(sum p expm1(d - c)),  c = sum p d.

This form stays accurate when q is close to p, unlike the difference of two logarithms; equal logits give 0.

Noise is measured in one pass of the exact model: each algorithm under test also sums the messages, so all algorithms get the
same inputs; the pass continues with the exact sum.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightwire.bench.quality.compared import make_any
from tightwire.bench.quality.items import ROW_TOKENS, TaskItem, batches, judge
from tightwire.bench.quality.options import LOSSY_SITES
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import EXACT, Arm, Setting, exact_arm, places
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import DROP
from tightwire.comm.protocols import AllReduce

_ROWS = 128  # rows whose logits one thread keeps in memory at a time

Floats = NDArray[np.float64]


class Scores(NamedTuple):
    """One number per position: negative log likelihood of the next token, KL (both nats), equal top token (0 or 1)."""

    nll_T: Floats
    kl_T: Floats
    same_top_T: Floats

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def make_pool(num_threads: int) -> ThreadPoolExecutor:
    """Threads for ``score``, each with one torch thread."""
    return ThreadPoolExecutor(num_threads, "score", initializer=torch.set_num_threads, initargs=(1,))


def score(
    pool: ThreadPoolExecutor, head_VD: Tensor, exact_TD: Tensor, others: Mapping[str, Tensor], next_ids_T: Tensor
) -> dict[str, Scores]:
    """Scores of each arm and of ``EXACT`` from final hidden states; ``next_ids_T`` are the true next tokens."""
    states, starts = {EXACT: exact_TD, **others}, range(0, len(exact_TD), _ROWS)

    def rows(start: int) -> dict[str, Scores]:
        part = slice(start, start + _ROWS)
        return _score_rows(head_VD.T, {name: own_TD[part] for name, own_TD in states.items()}, next_ids_T[part])

    parts = list(pool.map(rows, starts))
    return {name: Scores.joined([part[name] for part in parts]) for name in states}


@torch.inference_mode()
def _score_rows(head_DV: Tensor, states: Mapping[str, Tensor], next_ids_R: Tensor) -> dict[str, Scores]:
    next_ids_R1 = next_ids_R.long().unsqueeze(1)
    exact_RV = states[EXACT].float() @ head_DV
    log_sum_R = exact_RV.logsumexp(1)
    p_RV = (exact_RV - log_sum_R.unsqueeze(1)).exp_()
    top_R = exact_RV.argmax(1)
    nll_R = log_sum_R - exact_RV.gather(1, next_ids_R1).squeeze(1)
    scores = {EXACT: _scores(nll_R, torch.zeros_like(nll_R), torch.ones_like(nll_R))}
    for name, hidden_RD in states.items():
        if name == EXACT:
            continue
        other_RV = hidden_RD.float() @ head_DV
        same_R = other_RV.argmax(1) == top_R
        d_RV = other_RV.sub_(exact_RV)
        next_d_R = d_RV.gather(1, next_ids_R1).squeeze(1)
        center_R = torch.linalg.vecdot(p_RV, d_RV)
        kl_R = torch.linalg.vecdot(p_RV, d_RV.sub_(center_R.unsqueeze(1)).expm1_()).double().log1p()
        # log sum e^m = log sum e^l + c + KL
        other_nll_R = nll_R.double() + center_R.double() + kl_R - next_d_R.double()
        scores[name] = _scores(other_nll_R, kl_R.clamp_min(0), same_R)
    return scores


def _scores(*columns: Tensor) -> Scores:
    return Scores(*(column_R.double().numpy() for column_R in columns))


@dataclass(slots=True)
class Power:
    """Sums of squares over the elements of one layer's messages of one site: of the lossless sum, of an algorithm's error."""

    signal: float = 0.0
    noise: float = 0.0


Powers = dict[tuple[str, str, int], Power]  # by (algorithm, site, layer)


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise in decibels; infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def measure_noise(ranks: ThreadRanks, setting: Setting, numbers: Sequence[int], arms: Sequence[Arm]) -> Powers:
    """Measure the noise of each algorithm that an arm uses for prompt rows, at every site and layer."""
    names = dict.fromkeys(arm.algorithm(*place) for arm in arms for place in places(setting.config))
    names.pop(DROP, None)  # what is missing from a sum is no noise
    powers: Powers = {}
    ranks.set_arms([exact_arm()], lambda exact, group: NoiseRoutes(exact, group, list(names), powers))
    ranks.prefill(setting.windows.token_ids_NL[list(numbers)], 0)
    return powers


class NoiseRoutes(Routes):
    """One rank's routes for lossless ``arms``; ``algorithms`` also sum each prompt message. Rank 0 fills ``powers``."""

    def __init__(self, arms: Sequence[Arm], group: Group, algorithms: Sequence[str], powers: Powers) -> None:
        candidates = make_candidates([arm.policy for arm in arms], group)
        super().__init__([(arm.name, arm.policy) for arm in arms], candidates)
        self.others = {name: make_any(name, group) for name in algorithms}
        self._rank, self._powers = group.rank, powers

    def all_reduce(self, site: str, layer: int, phase: str, policy: int = 0) -> AllReduce:
        exact = super().all_reduce(site, layer, phase, policy)
        if site not in LOSSY_SITES or phase != "prefill":
            return exact
        return _Watched(exact, self, (site, layer))

    def add(self, site: str, layer: int, exact: Tensor, results: Mapping[str, Tensor]) -> None:
        if self._rank == 0:
            for name, result in results.items():
                power = self._powers.setdefault((name, site, layer), Power())
                power.signal += _square(exact)
                power.noise += _square(result.double() - exact.double())


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


class _Watched:
    """Returns the sum of ``exact``, and runs the other algorithms on the same message."""

    def __init__(self, exact: AllReduce, routes: NoiseRoutes, place: tuple[str, int]) -> None:
        self.name, self.lossless = exact.name, exact.lossless
        self.wire_bytes, self.max_error = exact.wire_bytes, exact.max_error
        self._exact, self._routes, self._place = exact, routes, place

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        exact = self._exact(x, phase, site)
        self._routes.add(*self._place, exact, {name: other(x) for name, other in self._routes.others.items()})
        return exact


@dataclass(kw_only=True, slots=True)
class Measured:
    """The results so far at one world size."""

    world_size: int
    scores: dict[str, Scores] = field(default_factory=dict)  # of all windows so far, by arm, the exact model included
    noise: Powers = field(default_factory=dict)
    items_right: dict[str, list[bool]] = field(default_factory=dict)  # by arm, the exact model included


def measure_arms(
    setting: Setting,
    ranks: ThreadRanks,
    arms: Sequence[Arm],
    pool: ThreadPoolExecutor,
    measured: Measured,
    show: Callable[[str], None],
    with_noise: bool = True,
) -> Iterator[None]:
    """Fill ``measured``; yield after each batch of windows. Raises ValueError if hidden states overflowed."""
    windows = setting.windows
    if with_noise:
        show("noise of each layer")
        measured.noise = measure_noise(ranks, setting, windows.measured[: setting.options.batch], arms)
    ranks.set_arms([exact_arm(), *arms])
    for numbers in setting.batches(windows.measured):
        states: dict[str, Tensor] = {}
        for number, name in enumerate([EXACT, *(arm.name for arm in arms)]):
            show(name)
            states[name] = windows.scored(
                ranks.forward(windows.token_ids_NL[list(numbers)], number, windows.num_decode)
            )
            if not states[name].isfinite().all():
                raise ValueError(f"{name} with {ranks.world_size} ranks: hidden states are not finite")
        show("comparing")
        new = score(pool, ranks.head_VD, states.pop(EXACT), states, windows.next_ids(numbers))
        for name, scores in new.items():
            measured.scores[name] = Scores.joined([*filter(None, [measured.scores.get(name)]), scores])
        yield
    yield from _answer_items(setting, ranks, arms, measured, show)


def num_steps(setting: Setting, num_arms: int) -> int:
    """The number of calls of ``show`` in ``measure_arms`` with noise."""
    num_batches = sum(1 for _ in setting.batches(setting.windows.measured))
    return 1 + num_batches * (num_arms + 2) + sum(1 for _ in _item_batches(setting)) * (num_arms + 1)


def _item_batches(setting: Setting) -> Iterator[tuple[list[TaskItem], Tensor]]:
    return batches(setting.items, setting.options.batch * (setting.options.window // ROW_TOKENS))


def _answer_items(
    setting: Setting, ranks: ThreadRanks, arms: Sequence[Arm], measured: Measured, show: Callable[[str], None]
) -> Iterator[None]:
    """Judge every arm's answers; yield after each batch of items."""
    for batch, rows_RL in _item_batches(setting):
        for number, name in enumerate([EXACT, *(arm.name for arm in arms)]):
            show(f"items: {name}")
            right = judge(batch, rows_RL, ranks.prefill(rows_RL, number), ranks.head_VD)
            measured.items_right.setdefault(name, []).extend(right)
        yield
