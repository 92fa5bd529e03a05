"""Turns the events of the ranks into cells: the step of an arm under a load, and what bounds it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tightwire.bench.report.statistics import describe
from tightwire.bench.stream.arms import PROBE, Answered, Arm, Event, Load, Probed, Timed

_Key = tuple[Arm, str, Load | None]


@dataclass(kw_only=True, slots=True)
class Cells:
    """The events of all arms with one number of ranks, by rank."""

    tp: int
    world_size: int  # above tp for replicas that make the same steps
    cores: int
    probes: dict[int, list[float]] = field(default_factory=dict)
    answers: dict[Arm, dict[int, Answered]] = field(default_factory=dict)
    blocks: dict[_Key, dict[int, list[Timed]]] = field(default_factory=dict)

    def add(self, rank: int, event: Event) -> None:
        if isinstance(event, Probed):
            self.probes[rank] = event.seconds
        elif isinstance(event, Answered):
            self.answers.setdefault(event.arm, {})[rank] = event
        else:
            self.blocks.setdefault((event.arm, event.kind, event.load), {}).setdefault(rank, []).append(event)

    def seconds(self, arm: Arm, kind: str, load: Load | None) -> list[float]:
        """Each pass on the slowest rank, of the passes that all ranks reported."""
        return [max(passes) for passes in self._by_pass(arm, kind, load, "seconds")]

    def rows(self, of: Arm | None = None) -> list[dict[str, Any]]:
        """Every cell (``of`` one arm) with all kinds of passes, in the order of the arms."""
        return [
            self._row(arm, load)
            for arm in self.answers
            if of in (None, arm)
            for load in sorted({load for own, _, load in self.blocks if own == arm and load}, key=_decode_first)
            if self._is_whole(arm, load)
        ]

    def _is_whole(self, arm: Arm, load: Load) -> bool:
        keys: list[_Key] = [(arm, "fetch", None), (arm, "compute", load), (arm, "step", load)]
        return all(self.seconds(*key) for key in [*keys, *([(arm, "raw", None)] if arm.has_raw else [])])

    def _row(self, arm: Arm, load: Load) -> dict[str, Any]:
        kinds: dict[str, Load | None] = {"fetch": None, "compute": load, "step": load}
        samples = {kind: self.seconds(arm, kind, of) for kind, of in kinds.items()}
        fetch_s, compute_s, step_s = (median(samples[kind]) for kind in kinds)
        core_s = sum(median(map(sum, self._by_pass(arm, kind, kinds[kind], "core_s"))) for kind in ("fetch", "compute"))
        step_bytes = [answer.step_bytes for answer in self.answers[arm].values()]
        wire_s = max(step_bytes) / arm.rate if arm.rate else None
        probe_s = median(map(max, zip(*self.probes.values(), strict=True)))
        bound_s = max(fetch_s, compute_s)
        raw = self.seconds(arm, "raw", None)
        raw_s = median(raw) if raw else None
        overlaps = [
            min(trace.overlap for trace in traces) for traces in self._by_pass(arm, "step", load, "traces")
        ]  # of the rank with the least overlap
        answer = next(iter(self.answers[arm].values()))
        return {
            "name": f"{arm.name}, tp {self.tp}, {load.name}",
            "arm": _arm_text(arm, answer.io),
            "load": load.name,
            "tp": self.tp,
            "dp": self.world_size // self.tp,
            "source": arm.source,
            "io": answer.io or None,
            "codec": arm.codec,
            "rate_bytes_per_s": arm.rate or None,
            "step_kind": "decode" if load.is_decode else "prompt",
            "rows": load.rows,
            "bytes_per_step": max(step_bytes),  # of the rank that fetches most
            "bytes_per_step_all_ranks": sum(step_bytes),
            "seconds": asdict(describe(samples["step"])),  # pyright: ignore[reportArgumentType]
            "step_s": step_s,
            "fetch_s": fetch_s,
            "compute_s": compute_s,
            "bytes_per_s": max(step_bytes) / fetch_s,
            "bound_s": bound_s,
            "bound_by": "source" if fetch_s > compute_s else "compute",
            "over_bound": step_s / bound_s,
            "raw_s": raw_s,
            "over_source_bound": None if raw_s is None else step_s / max(raw_s, compute_s),
            "cores_s": core_s / self.cores,
            "over_cores_bound": step_s / max(bound_s, core_s / self.cores),
            "wire_s": wire_s,
            "over_wire_bound": None if wire_s is None else step_s / max(wire_s, compute_s),
            "overlap": median(overlaps) if overlaps else None,
            "speed_up_over_none": self._speed_up(arm, load, step_s),
            "tokens_per_s": load.rows / step_s,
            "ttft_s": max(fetch_s, probe_s),
            "break_even_rows": fetch_s / (probe_s / PROBE.rows),
            "same_tokens": self._same_tokens(arm),
            "faults": self._faults(arm),
            "samples": {**samples, "raw": raw},
        }

    def _by_pass(self, arm: Arm, kind: str, load: Load | None, what: str) -> list[tuple[Any, ...]]:
        """The values of every rank, pass by pass; [] until all ranks reported."""
        ranks = self.blocks.get((arm, kind, load), {})
        if len(ranks) < self.world_size:
            return []
        return list(
            zip(
                *([value for block in blocks for value in getattr(block, what)] for blocks in ranks.values()),
                strict=False,
            )
        )

    def _speed_up(self, arm: Arm, load: Load, step_s: float) -> float | None:
        plain = self.seconds(Arm(arm.source, "none", arm.rate), "step", load)
        return median(plain) / step_s if plain else None

    def _same_tokens(self, arm: Arm) -> float:
        """The share of greedy tokens before the first that differs from resident weights', of the worst rank."""
        return min(map(_share_of_same, self.answers[arm].values()))

    def _faults(self, arm: Arm) -> list[str]:
        """Wrong answers and wrong buffer orders, which invalidate the arm."""
        found = [
            f"rank {rank}: it generates {answer.tokens}, resident weights {answer.resident_tokens}"
            for rank, answer in self.answers[arm].items()
            if arm.codec == "none" and answer.tokens != answer.resident_tokens
        ]
        for (of, _, _), ranks in self.blocks.items():
            found += [
                f"rank {rank}: {block.disorder}"
                for rank, blocks in ranks.items()
                for block in blocks
                if of == arm and block.disorder
            ]
        return list(dict.fromkeys(found))


def _arm_text(arm: Arm, io: str) -> str:
    return arm.name if not io else arm.name.replace(arm.source, f"{arm.source} ({io})", 1)


def _share_of_same(answer: Answered) -> float:
    pairs = list(zip(answer.tokens, answer.resident_tokens, strict=True))
    return next((place for place, (mine, its) in enumerate(pairs) if mine != its), len(pairs)) / len(pairs)


def _decode_first(load: Load) -> tuple[bool, int]:
    return not load.is_decode, load.rows


def fault_texts(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Every fault once, with its arm."""
    return list(
        dict.fromkeys(
            f"{row['source']} {row['codec']} at tp {row['tp']}: {fault}" for row in rows for fault in row["faults"]
        )
    )
