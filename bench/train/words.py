"""Defines the column names and texts of ``bench train``."""

from typing import Any

from tightwire.bench.train.findings import Finding
from tightwire.bench.train.summary import MOST_PREDICTION_ERROR

COLUMNS = ("step s", "spread", "MB a step", "exposed s", "computing s", "predicted s", "error", "bound s", "/bound")
CHECK_COLUMNS = (
    "loss",
    "against exact",
    "peak MB",
    "by formula",
    "resident MB",
    "sent / formula",
    "wire payload / formula",
)
PAPER_COLUMNS = ("arm", "GPUs", "nodes", "Gbit/s", "GB between nodes", "step s", "tokens/s of a GPU", "computing")
TIMES = (
    "Seconds are medians of steps, each as long as on the slowest rank; all ranks begin together and arms take turns in random "
    "order. Spread is from the shortest to the longest. MB leave a node in a step: of the engine by formula, of torch's arms as "
    "the kernel counted their payload. Exposed is the step without its computing, which is the same step in the same process "
    "where messages take no time. The bound is the longer of computing and of what those MB take at the rate of a bulk transfer."
)
PREDICTIONS = (
    "Predicted from formulas of bytes, computing measured without the wire, and the wire's rate and round as collectives of "
    "1 MiB and 1 KiB see them; nothing is fitted to steps. The rules of who waits for whom are the engine's: two lanes, "
    "buffers in turns, weights asked for ahead. Not in it: cores that packets take from computing."
)
CHECKS = (
    "From the first steps, in processes of their own without a slow link. Arms that add rank by rank must have the same losses to "
    "the bit; others that add everything, up to the rounding of another order. Peak is what the process had in use at "
    "most beyond what it had before the arm, libraries' own buffers included: its resident memory while all that is freed goes "
    "back to the system at once. Resident is the same where the allocator may keep what is freed, as while steps are timed. Bytes sent are the ledgers', and must be the formula's."
)
ON_PAPER = "On paper. No such machine was measured; the same rules with these assumptions: "


def describe_setting(facts: dict[str, Any]) -> str:
    """Model, ranks and batch in one line."""
    return (
        f"{facts['model']} ({facts['num_parameters'] / 1e6:.1f} M parameters), {facts['dtype']}; {facts['nodes']} nodes of "
        f"{facts['ranks_per_node']} ranks, one thread each on {facts['environment']['usable_cores']} cores; "
        f"{facts['sequences']} x {facts['sequence_tokens']} tokens a rank and step"
    )


def describe_link(link: dict[str, Any]) -> str:
    if not link["rates"]:
        return link["name"]
    rates = link["rates"]
    return (
        f"{link['name']}: bulk {link['bytes_per_s'] * 8 / 1e6:.0f} Mbit/s ({link['how']}); a rank's collectives "
        f"{_mb(rates['across_bytes_per_s'])} MB/s across nodes, {_mb(rates['inside_bytes_per_s'])} MB/s inside, rounds of "
        f"{rates['across_round_s'] * 1e3:.1f} and {rates['inside_round_s'] * 1e3:.1f} ms"
    )


def describe_others(facts: dict[str, Any]) -> str:
    """The share of the cores that other programs used."""
    return f"others used {facts['others_share']:.0%} of this machine's cores while it was measured"


def describe_predictions(rows: list[dict[str, Any]]) -> str:
    errors = [abs(row["prediction_error"]) for row in rows if row["prediction_error"] is not None]
    within = sum(error <= MOST_PREDICTION_ERROR for error in errors)
    return f"{within} of {len(errors)} predictions are within {MOST_PREDICTION_ERROR:.0%}; the worst is off by {max(errors):.0%}"


def describe_finding(finding: Finding) -> str:
    other = finding.slower if finding.link == finding.slower_link else f"{finding.slower} at {finding.slower_link}"
    return f"{finding.link}: {finding.arm} is {finding.ratio:.2f} x as fast as {other}"


def cell_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``COLUMNS``."""
    seconds, error = row["seconds"], row["prediction_error"]
    return [
        f"{seconds['p50']:.2f}",
        f"{seconds['min']:.2f}-{seconds['max']:.2f}",
        _mb(row["node_bytes"] or row["node_payload_bytes"]),
        _number(row["exposed_s"]),
        _number(row["computing_s"]),
        _number(row["predicted_s"]),
        "-" if error is None else f"{error:+.0%}",
        _number(row["bound_s"]),
        _number(row["over_bound"]),
    ]


def check_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``CHECK_COLUMNS``."""
    error, sent = row["loss_error"], row["ledger_bytes"]
    return [
        f"{row['losses'][-1]:.6f}",
        "other optimizer" if error is None else "equal" if error == 0 else f"{error:.1e}",
        "-" if row["peak_bytes"] is None else _mb(row["peak_bytes"]),
        "-" if row["formula_peak_bytes"] is None else _mb(row["formula_peak_bytes"]),
        "-" if row["resident_bytes"] is None else _mb(row["resident_bytes"]),
        "-" if sent is None else f"{sum(sent) / sum(row['formula_bytes']):.3f}" if sum(row["formula_bytes"]) else "-",
        "-" if row["payload_over_formula"] is None else f"{row['payload_over_formula']:.3f}",
    ]


def paper_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``PAPER_COLUMNS``."""
    return [
        *(row["arm"], str(row["gpus"]), str(row["nodes"]), str(row["gbit"])),
        f"{row['node_bytes'] / 1e9:.2f}",
        f"{row['step_s']:.2f}",
        f"{row['tokens_per_gpu_s']:,.0f}",
        f"{row['computing_share']:.0%}",
    ]


def describe_assumptions(assumed: dict[str, Any]) -> str:
    return (
        f"{assumed['model'].removeprefix('random:')} in bfloat16, {assumed['sequences']} sequence of {assumed['sequence_tokens']} "
        f"tokens a GPU and step; {assumed['flops_per_s'] / 1e12:.0f} TFLOP/s of a GPU reached, codecs free; nodes of "
        f"{assumed['gpus_per_node']} GPUs (two nodes of four for 8); {assumed['inside_bytes_per_s'] / 1e9:.0f} GB/s of a GPU inside, "
        f"all of the named rate between nodes; rounds of {assumed['inside_round_s'] * 1e6:.0f} and "
        f"{assumed['across_round_s'] * 1e6:.0f} us."
    )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}" if num_bytes < 1e7 else f"{num_bytes / 1e6:.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
