"""Rows, tables and page of ``bench ttft``, one row for each arm in each cell, and the recommended command lines."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from tightwire.bench.report.page import Item, Text
from tightwire.bench.report.plot import bars
from tightwire.bench.report.statistics import Comparison, compare, describe
from tightwire.bench.report.table import Column, Table
from tightwire.bench.ttft.measure import Arm, Measured, Request, Turn
from tightwire.bench.ttft.options import GROUPS, TtftOptions, to_argv
from tightwire.bench.ttft.proof import Cell
from tightwire.comm.transport.sockets import interface_bytes
from tightwire.sizes import format_bytes

_REST = ("http_s", "tokenize_s", "queue_s", "engine_s", "sampling_s", "send_s")
_ONE_LEG = ("one-shot", "direct")  # algorithms that send each other rank one message; all others send two
_PLAN_BYTES = 58  # of a step, to each other host, with ZeroMQ's framing
_MOST_TPOT = 1.05  # ratio of medians that may be noise, if the interval contains 1
_PARTS = (*_REST, "compute_s", "codec_s", "allreduce_s")
# Options of the emulated wire and of the AllReduce, which the recommended command line leaves out.
_LEFT_OUT = ("model", "link", "link_emulation", "allreduce", "allreduce_extra")


def make_rows(measured: Measured) -> list[dict[str, Any]]:
    """Plain data for every cell and arm that has run."""
    return [
        _row(measured, cell, arm)
        for cell in measured.cells
        for arm in measured.arms
        if measured.of(cell, measured.baseline)
    ]


def _row(measured: Measured, cell: Cell, arm: Arm) -> dict[str, Any]:
    turns = measured.of(cell, arm)
    requests = [request for turn in turns for request in turn.requests]
    measured_parts = {part: [request.parts.get(part) for request in requests] for part in _PARTS}
    known = {part: [value for value in values if value is not None] for part, values in measured_parts.items()}
    parts = {part: statistics.median(values) if values else None for part, values in known.items()}
    row = {
        "name": f"{arm.name}, {cell.prompt_len} tokens, {cell.concurrency} at a time",
        "samples": _samples(measured, cell, arm),
        **asdict(cell),
        "arm": arm.name,
        "algorithm": arm.algorithm,
        "lossless": arm.lossless,
        "error": arm.error,
        "rounds": len(turns),
        "ttft_s": describe([request.ttft_s for request in requests]),
        "ratio": _ratio(measured, cell, arm, "ttft_s"),
        "tpot_s": describe([request.tpot_s for request in requests]),
        "tpot_ratio": _ratio(measured, cell, arm, "tpot_s"),
        "parts_s": parts,
        "rest_s": sum(parts[part] or 0.0 for part in _REST),
        # Bytes that rank 0 sends for one prompt.
        "sent_bytes": sum(c.bytes_sent for t in turns for c in t.counts if c.phase == "prefill") / len(requests),
        **_later_token(measured, turns),
        "wire_bytes": _wire(requests, 0),
        "wire_token_bytes": _wire(requests, 1, measured.output_len - 1),
        "wire_token_formula": _wire_formula(measured, turns),
    }
    return {**row, "bound": _bound(measured, cell, row)}


def _later_token(measured: Measured, turns: Sequence[Turn]) -> dict[str, float]:
    """The bytes that rank 0 sends for a token after the first, by the formula, and the sums' share of its time."""
    num_later = measured.output_len - 1
    counts = [count for turn in turns for count in turn.counts if count.phase == "decode"]
    sums_s = sum(count.seconds for count in counts if count.op == "all_reduce")
    num_tokens = num_later * sum(len(turn.requests) for turn in turns)
    return {
        "token_bytes": sum(count.bytes_sent for count in counts) / num_tokens,
        "token_sum_share": sums_s / (num_later * sum(turn.mean("tpot_s") for turn in turns)),
    }


def _wire(requests: Sequence[Request], part: int, num_tokens: int = 1) -> float | None:
    """Median bytes by the interface of host 0 for the prompt (part 0), or for each later token (part 1)."""
    sent = [request.wire[part].bytes for request in requests if request.wire]
    return statistics.median(sent) / num_tokens if sent else None


def _wire_formula(measured: Measured, turns: Sequence[Turn]) -> float | None:
    """Bytes that the interface of host 0 should count for each later token: messages, the step's plan, and all frames' headers.

    The number of frames is the interface's own, because how many acknowledgements travel alone depends on timing. None:
    several ranks on a host, or a transport with other headers.
    """
    frames = [request.wire[1].frames for turn in turns for request in turn.requests if request.wire]
    counts = [count for turn in turns for count in turn.counts if count.phase == "decode"]
    own_sockets = measured.comm.get("transport") == "sockets" and all(count.algorithm != "native" for count in counts)
    if not frames or not measured.num_peers or not own_sockets:
        return None
    num_tokens = (measured.output_len - 1) * len(frames)
    legs = sum(count.calls * (1 if count.algorithm in _ONE_LEG else 2) for count in counts)
    payload = sum(count.bytes_sent for count in counts) / num_tokens + _PLAN_BYTES * measured.num_peers
    return interface_bytes(payload, measured.num_peers * legs / num_tokens, sum(frames) / num_tokens)


def _bound(measured: Measured, cell: Cell, row: Mapping[str, Any]) -> dict[str, float] | None:
    """The least TTFT on an emulated link between ranks: computing, coding, and the bytes at the link's rate.

    With overlap computing and sending happen at once, and the slower is the bound. None where the bytes of a request
    are not known: several requests at a time, or several ranks on a node.
    """
    link = measured.comm.get("link")
    rate = link and (link["measured_bytes_per_s"] or link["asked_bytes_per_s"])
    if not rate or cell.concurrency > 1 or measured.ranks_share_wire:
        return None
    # Without a codec time, coding is inside a fused kernel and not in the bound.
    busy_s = (row["parts_s"]["compute_s"] or 0.0) + (row["parts_s"]["codec_s"] or 0.0)
    wire_s = row["sent_bytes"] / rate
    bound_s = max(wire_s, busy_s) if measured.comm.get("overlap") else wire_s + busy_s
    return {"wire_s": wire_s, "bound_s": bound_s, "ttft_over_bound": row["ttft_s"]["p50"] / bound_s}


def _samples(measured: Measured, cell: Cell, arm: Arm) -> dict[str, list[float]]:
    """Each round's value, and its ratio to the baseline's, in which the machine's state cancels, for ``bench compare``."""
    found: dict[str, list[float]] = {}
    for name in ("ttft", "tpot"):
        own, base = ([turn.mean(f"{name}_s") for turn in measured.of(cell, each)] for each in (arm, measured.baseline))
        found[f"{name}_s"] = own
        if arm != measured.baseline:
            found[f"{name}_ratio"] = [a / b for a, b in zip(own, base, strict=True) if b]
    return found


def _ratio(measured: Measured, cell: Cell, arm: Arm, of: str) -> dict[str, Any] | None:
    """The ratio of ``arm`` to the baseline, paired by round; None for the baseline itself."""
    if arm == measured.baseline:
        return None
    base, own = ([turn.mean(of) for turn in measured.of(cell, each)] for each in (measured.baseline, arm))
    return asdict(compare(base, own, paired=True, seed=measured.seed))


def recommend(measured: Measured, options: TtftOptions) -> list[dict[str, Any]]:
    """The lossless and the lossy command line to use, empty before all cells have run.

    Another arm replaces the server's default only if its TTFT is certainly shorter and its TPOT no longer, each over all cells;
    a lossy one must be better than the lossless one in the same way. An arm that is only half better is named in the reason.
    """
    if options.layouts or not measured.arms or not all(measured.of(cell, measured.default) for cell in measured.cells):
        return []
    best, found = measured.default, []
    for lossless in (True, False):
        arms = [arm for arm in measured.arms if arm.lossless == lossless and arm.name == arm.algorithm and arm != best]
        gains = {arm: gain for arm in arms if (gain := _gain(measured, best, arm))}
        better = {arm: gain for arm, gain in gains.items() if gain.is_better}
        traded = "".join(f"; {arm.name}: {gain}" for arm, gain in gains.items() if not gain.is_better)
        base, arm = best, min(better, key=lambda arm: better[arm].ttft.ratio, default=None)
        if arm is not None:
            best, reason = arm, f"{better[arm]} of {base.name}'s"
            reason += "" if lossless else f", relative RMS error {arm.error:.2g} in each AllReduce"
            found.append(_recommendation(options, arm, reason + traded, better[arm].ttft))
        elif lossless:
            reason = "no other lossless AllReduce has a certainly shorter TTFT and no longer TPOT"
            found.append(_recommendation(options, best, reason + traded, None))
    return found


class _Gain(NamedTuple):
    """An arm against another one over all cells."""

    ttft: Comparison
    tpot: Comparison

    @property
    def is_better(self) -> bool:
        return self.tpot.low <= 1 and self.tpot.ratio <= _MOST_TPOT

    def __str__(self) -> str:
        return f"TTFT {_words(self.ttft)}, TPOT {_words(self.tpot)}"


def _gain(measured: Measured, base: Arm, arm: Arm) -> _Gain | None:
    """The gain where the TTFT is certainly shorter."""
    sides = [(_by_round(measured, base, of), _by_round(measured, arm, of)) for of in ("ttft_s", "tpot_s")]
    found = _Gain(*(compare(*each, paired=True, seed=measured.seed) for each in sides))
    return found if found.ttft.verdict == "faster" else None


def _recommendation(options: TtftOptions, arm: Arm, reason: str, ratio: Comparison | None) -> dict[str, Any]:
    flags = to_argv(options.config, GROUPS, leave_out=_LEFT_OUT)
    command = shlex.join(["tightwire", "serve", options.config.model.model, *flags, "--allreduce", arm.algorithm])
    kind = "lossless" if arm.lossless else "lossy"
    ratio_facts = None if ratio is None else asdict(ratio)
    return {"arm": arm.name, "kind": kind, "command": command, "reason": reason, "ratio": ratio_facts}


def _words(ratio: Comparison) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _by_round(measured: Measured, arm: Arm, of: str) -> list[float]:
    """Each round's geometric mean over the cells, so that long prompts have no more weight than short ones."""
    columns = [[math.log(turn.mean(of)) for turn in measured.of(cell, arm)] for cell in measured.cells]
    return [math.exp(statistics.fmean(logs)) for logs in zip(*columns, strict=False)]


def _ms(name: str, key: str, detail: bool = False) -> Column:
    return Column(name, key, ",.1f", 1e3, detail)


def _bytes(name: str, key: str, detail: bool = False) -> Column:
    return Column(name, key, lambda sent: format_bytes(round(sent)), detail=detail)


_ARM = Column("algorithm", "arm")
_PLACE = (Column("prompt", "prompt_len", "d"), Column("at a time", "concurrency", "d"))
_TIME_PARTS = (
    _ms("compute", "parts_s.compute_s"),
    _ms("codec", "parts_s.codec_s"),
    _ms("AllReduce", "parts_s.allreduce_s"),
    _ms("rest", "rest_s"),
)
_TTFT_COLUMNS = (
    _ARM,
    Column("n", "ttft_s.n", "d", detail=True),
    *(_ms(key, f"ttft_s.{key}", detail=key != "p50") for key in ("mean", "std", "p50", "p90", "p99")),
    Column("ratio [95 %]", "ratio", lambda ratio: f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"),
    Column("verdict", "ratio.verdict"),
)
_OTHER_COLUMNS = (
    _ARM,
    *_TIME_PARTS,
    _bytes("sent", "sent_bytes"),
    Column("x bound", "bound.ttft_over_bound", ".2f"),
    _ms("TPOT", "tpot_s.p50"),
    Column("(ratio)", "tpot_ratio.ratio", ".2f"),
    Column("in sums", "token_sum_share", ".0%", detail=True),
    _bytes("sent a token", "token_bytes"),
    Column("error", "error", ".2g"),
    _bytes("wire", "wire_bytes", True),
    _bytes("wire a token", "wire_token_bytes", True),
    _bytes("by formula", "wire_token_formula", True),
)
CSV_COLUMNS = (
    *_PLACE,
    *(column for column in (*_TTFT_COLUMNS, *_OTHER_COLUMNS[1:]) if column.key != "ratio"),
    *(Column(f"ratio {key}", f"ratio.{key}", ".3f") for key in ("ratio", "low", "high")),
)
LEGENDS = (
    (
        "TTFT in ms at the client, from sending to the first text. Ratio: of medians to the baseline, paired by round; below 1 is "
        "faster."
    ),
    (
        "Median times in ms. AllReduce: without coding, including the wait for slower ranks. Rest: HTTP, tokenizing, queue, "
        "scheduling, sampling, sending. Sent: by rank 0 for one prompt, or a later token. Wire: the same by the counters of host 0's "
        "interface, with headers. By formula: what they should be, from the bytes sent, 16 a message, 66 a frame and the step's plan; "
        "the rest is repeated frames. In sums: the share of a later token's time. X bound: TTFT over compute + codec + bytes / "
        "bandwidth, where the link's bandwidth is known. Ratio: to the baseline. Error: relative RMS error of one AllReduce."
    ),
)


def recommended_lines(result: Mapping[str, Any]) -> list[str]:
    """The command lines to paste and the reasons, lossless first."""
    found = []
    for each in result["recommended"]:
        found += [f"{each['kind']}: {each['command']}", f"  {each['reason']}"]
    if len(result["recommended"]) == 1 and not all(row["lossless"] for row in result["cells"]):
        found.append("lossy: none has a certainly shorter TTFT and no longer TPOT")
    return found


def describe_setting(result: Mapping[str, Any]) -> str:
    options = result["options"]
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return (
        f"{result['model']} ({result['dtype']} on {result['device']}) over {result['tp']} ranks{nodes}: "
        f"{', '.join(options['algorithms'])} against {options['baseline']}; "
        f"{options['repeats']} random rounds, {options['output_len']} output tokens, seed {result['seed']}"
    )


def describe_link(link: Mapping[str, Any] | None) -> str:
    if link is None:
        return "the machine's own"
    rate = link["measured_bytes_per_s"]
    measured = "" if rate is None else f", {rate * 8 / 1e6:,.1f} Mbit/s measured"
    how = "by the kernel, between network namespaces" if link["emulation"] == "namespaces" else "in user space"
    reason = f" ({link['reason']})" if link["reason"] else ""
    return f"{link['name']}, emulated {how}{reason}{measured}, latency {link['latency_s'] * 1e6:g} us"


def tables(result: Mapping[str, Any]) -> list[Table]:
    found = []
    for cell in dict.fromkeys((row["prompt_len"], row["concurrency"]) for row in result["cells"]):
        rows = [row for row in result["cells"] if (row["prompt_len"], row["concurrency"]) == cell]
        title = f"{cell[0]} prompt tokens, {cell[1]} at a time"
        found.append(Table(title=f"{title}: TTFT, ms", columns=_TTFT_COLUMNS, rows=rows))
        found.append(Table(title=f"{title}: parts of TTFT, decode", columns=_OTHER_COLUMNS, rows=rows))
    return found


def make_sections(result: Mapping[str, Any]) -> list[Item]:
    """The recommendation, bars, then every number. The bars are the picture in the README."""
    rows, text = result["cells"], recommended_lines(result)
    items: list[Item] = [Text(title="Recommended", lines=text)] if text else []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        own = [{**row, "bar": f"{row['prompt_len']} {row['arm']}"} for row in rows if row["concurrency"] == concurrency]
        title, bar = f"Parts of TTFT, {concurrency} at a time", Column("prompt tokens and AllReduce", "bar")
        note = "Median of each part. AllReduce includes the wait for slower ranks and, in fused kernels, coding."
        items.append(bars(title, own, label=bar, parts=_TIME_PARTS, x_label="ms inside the server", note=note))
    for title, legend, columns in zip(
        ("TTFT, ms", "Parts of TTFT, decode"), LEGENDS, (_TTFT_COLUMNS, _OTHER_COLUMNS), strict=True
    ):
        items.append(Table(title=title, columns=[*_PLACE, *columns], rows=rows, note=legend))
    return items
