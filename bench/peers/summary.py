"""Turns boiled down: for each server and number of requests in flight, medians over rounds, and ratios to the first."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tightwire.bench.report.statistics import compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of a turn's load: ``key`` in the result of `bench serve`."""

    key: str
    title: str
    unit: str
    scale: float
    worse_is_higher: bool = True

    def of(self, load_result: dict[str, Any]) -> float | None:
        """The median over the load's requests, or the load's rate; None where answers have one token."""
        value = load_result[self.key]
        return value["p50"] if isinstance(value, dict) else value


FIGURES = (
    Figure(key="ttft_s", title="TTFT", unit="ms", scale=1e3),
    Figure(key="tpot_s", title="TPOT", unit="ms", scale=1e3),
    Figure(key="output_tokens_per_s", title="Output", unit="tokens/s", scale=1.0, worse_is_higher=False),
)


def summarize(peers: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """A cell for every server, number of requests in flight, and figure.

    ``median`` is over rounds, of each round's median. ``comparison`` is server / first server, rounds being the pairs;
    None for the first server itself and where no round has both.
    """
    cells: list[dict[str, Any]] = []
    for index, peer in enumerate(peers):
        for concurrency in _concurrencies(peer):
            for figure in FIGURES:
                by_round = _by_round(peer, concurrency, figure)
                if not by_round:
                    continue
                base = _by_round(peers[0], concurrency, figure) if index else {}
                common = sorted(by_round.keys() & base.keys())
                comparison = (
                    compare(
                        [base[number] for number in common],
                        [by_round[number] for number in common],
                        paired=True,
                        seed=seed,
                        worse_is_higher=figure.worse_is_higher,
                    )
                    if common
                    else None
                )
                cells.append(
                    {
                        "server": peer["name"],
                        "concurrency": concurrency,
                        "figure": figure.key,
                        "median": statistics.median(by_round.values()),
                        "rounds": list(by_round.values()),
                        "comparison": asdict(comparison) if comparison else None,
                    }
                )
    return cells


def _concurrencies(peer: dict[str, Any]) -> list[int]:
    return list(dict.fromkeys(load["concurrency"] for turn in peer["turns"] for load in turn["loads"]))


def _by_round(peer: dict[str, Any], concurrency: int, figure: Figure) -> dict[int, float]:
    return {
        turn["round"]: value
        for turn in peer["turns"]
        for load in turn["loads"]
        if load["concurrency"] == concurrency and (value := figure.of(load)) is not None
    }


def doubts(result: dict[str, Any]) -> list[str]:
    """Reasons to read the figures with care: what is missing first."""
    peers = result["peers"]
    why, done, asked = result["error"], result["rounds"], result["rounds_asked"]
    found = [f"{why or 'the time was up'}: {done} of {asked} rounds"] if why or done < asked else []
    found += [f"{peer['name']} was left out: {reason(peer['fault'])}" for peer in peers if peer["fault"]]
    for peer in peers:
        turns = peer["turns"]
        others = max((turn["others_share"] or 0.0 for turn in turns), default=0.0)
        if others >= _MOST_OTHERS:
            found.append(f"programs outside used up to {others:.0%} of the cores while {peer['name']} was measured")
        awake = {name: share for turn in turns for name, share in turn["idle_share"].items() if share >= _MOST_IDLE}
        found += [f"{name}, idle, used {share:.1%} of the cores under {peer['name']}" for name, share in awake.items()]
        found += _wrong_lengths(peer)
    return found


def reason(fault: str) -> str:
    """One line of a fault that may end with a log: how it showed, and the last error that the log names."""
    first, *log = fault.splitlines()
    errors = [line.strip() for line in log if re.search(r"error\b\s*[:,]", line, re.IGNORECASE)]
    return f"{first} {errors[-1]}" if errors else first


_MOST_OTHERS = 0.1  # of the cores
_MOST_IDLE = 0.02


def _wrong_lengths(peer: dict[str, Any]) -> list[str]:
    """An answer that ends early is a load that another server had and this one had not."""
    for turn in peer["turns"]:
        for load in turn["loads"]:
            tokens = {"prompt": load["prompt_tokens"], "generated": load["generated_tokens"]}
            per_request = {kind: number / load["succeeded"] for kind, number in tokens.items()}
            for kind, number in per_request.items():
                wanted = turn["wanted"][kind]
                if abs(number - wanted) > 0.02 * wanted + 0.5:
                    return [f"{peer['name']}: {number:.1f} {kind} tokens a request, {wanted} asked, {load['name']}"]
    return []
