"""Prints every AllReduce for the messages a model will send, with its cost and the reason for the choice."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tightwire.comm.policy.choose import Chooser, PolicyRequest, Verdict
from tightwire.comm.policy.rules import PHASES, Choice, describe_layers
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.checkpoint.config import check_context
from tightwire.model.open import fingerprint, formats_of
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import planned_hosts
from tightwire.server.hosts.place import last_probe
from tightwire.server.plan import run_plan
from tightwire.server.plan.comm_decision import CommDecision, decide_sums, policy_requests
from tightwire.server.plan.layout_decision import decide_stages
from tightwire.server.plan.layout_table import memory_inputs
from tightwire.server.plan.rank_bytes import CacheShape, rank_bytes
from tightwire.server.plan.setting import choose_activations, requested_link
from tightwire.sizes import aligned, format_bytes

_SITES = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Explained:
    """One message size of a phase and its candidates, the chosen one first."""

    sites: tuple[str, ...]
    layers: tuple[int, ...] | None  # None: all
    phase: str
    num_rows: int
    num_bytes: int
    verdicts: list[Verdict]


def run(config: ServeConfig, as_json: bool, network: bool) -> None:
    """Print the explanation. ``network``: between hosts, as probed. ValueError: options are refused."""
    link = last_probe() if network else None
    if link is not None:
        nodes = 1 + max(pair.nodes[1] for pair in link.pairs)
        sys.stderr.write(f"{link.describe(nodes)}\n")
        config = planned_hosts(config, nodes)
    if config.parallel.num_summing == 1:
        advice = "leave it out, or compare layouts with --hosts"
        raise ValueError(f"--layout pipeline with a rank in each stage sums nothing, and this explains sums; {advice}")
    config, checkpoint = run_plan.open_model(config)
    model, formats = checkpoint.config, formats_of(checkpoint, config.model.quantization)
    check_context(model.max_positions, config.engine.max_model_len or 0)
    sums = decide_sums(config, model, link or requested_link(config.parallel), fingerprint(checkpoint))
    device = sums.decided.setting.device
    choose_activations(config.model.activations, device, formats.packed)
    stages = decide_stages(config, model, formats, sums.decided, checkpoint.prepared is not None)
    adapters = run_plan.plan_adapters(config.adapters, model)
    draft = run_plan.open_draft(config, checkpoint)
    room = adapters and AdapterRoom(adapters.num_slots, adapters.max_rank)
    inputs = memory_inputs(config, model, formats, sums.decided, draft)
    inputs = replace(inputs, stages=stages, num_replicas=config.parallel.dp, adapters=room)
    ranks = rank_bytes(inputs, EVERYTHING_RESIDENT)
    added = adapters and run_plan.describe_adapters(adapters, [rank.adapters for rank in ranks])
    drafts = draft and inputs.draft and run_plan.describe_draft(draft.name, inputs.draft)
    decision, request = sums.comm, next(iter(policy_requests(config, model).values()))
    assert decision is not None  # `explain` takes at least two ranks
    explained = explain(decision.chooser, request, decision.setting.elem_bytes, model.num_layers)
    by_kind = CacheShape.of(model, config.engine).describe(config.engine.max_model_len or model.max_positions)
    nodes = run_plan.describe_nodes(config, device, [rank.fixed for rank in ranks])
    notes = [*filter(None, (added, drafts, by_kind and f"KV cache: {by_kind}", *nodes))]
    if as_json:
        sys.stdout.write(json.dumps({**_as_data(decision, explained), "notes": notes}) + "\n")
    else:
        console = Console(highlight=False)
        _show(console, decision, explained)
        for line in notes:
            console.print(line, markup=False)


def explain(chooser: Chooser, request: PolicyRequest, elem_bytes: int, num_layers: int) -> list[Explained]:
    """Explain the message sizes of the model: decode steps from one row to full batches, and prompt chunks."""
    explained, most = [], request.max_decode_rows
    decode = {min(count, most) for count in (1, 16, most)}
    sizes = {"decode": decode, "prefill": {max(1, request.max_rows // 8), request.max_rows}}
    for phase in PHASES[::-1]:
        for sites, layers in _kinds(chooser, phase, num_layers):
            for num_rows in sorted(sizes[phase]):
                num_bytes = num_rows * request.row_elems * elem_bytes
                verdicts = chooser.verdicts(sites[0], phase, num_bytes, layers[0] if layers else 0)
                explained.append(Explained(sites, layers, phase, num_rows, num_bytes, verdicts))
    return explained


def _kinds(chooser: Chooser, phase: str, num_layers: int) -> list[tuple[tuple[str, ...], tuple[int, ...] | None]]:
    """Groups of sites and layers with the same choices; None: all layers."""
    policy, kinds = chooser.policy(), dict[tuple[Choice, ...], dict[str, list[int]]]()
    for site in _SITES:
        for layer in range(num_layers):
            kinds.setdefault(policy.choices(site, layer, phase), {}).setdefault(site, []).append(layer)
    found: list[tuple[tuple[str, ...], tuple[int, ...] | None]] = []
    for by_site in kinds.values():
        for layers in sorted({tuple(layers) for layers in by_site.values()}):
            sites = tuple(site for site in by_site if tuple(by_site[site]) == layers)
            found.append((sites, None if len(layers) == num_layers else layers))
    return found


def _show(console: Console, decision: CommDecision, explained: Sequence[Explained]) -> None:
    for warning in filter(None, (decision.warning, decision.chooser.warning)):
        console.print(f"warning: {warning}", style="yellow", markup=False)
    source = "`tightwire tune` has not measured yet, so times are predicted (~)"
    if decision.setting.link:
        source = "times are predicted from the link's rate and latency (~)"
    elif decision.measured:
        source = f"measured on this host, {decision.measured.date}"
    console.print(f"{decision.setting}; {source}\n", markup=False)
    for entry in explained:
        where = "" if entry.layers is None else f" of {describe_layers(entry.layers)}"
        rows = f"{entry.num_rows} {'row' if entry.num_rows == 1 else 'rows'}, {format_bytes(entry.num_bytes)}"
        console.print(f"{entry.phase}, {' and '.join(entry.sites)}{where}: {rows}", style="bold", markup=False)
        _show_verdicts(console, entry.verdicts)
        console.print()


def _show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """A row of numbers for each algorithm, and its reason below, which may be longer than the terminal is wide."""
    rows = [("algorithm", "us", "sent", "error"), *map(_cells, verdicts)]
    for line, verdict in zip(aligned(rows), (None, *verdicts), strict=True):
        style = "bold green" if verdict and verdict.chosen else ""
        console.print(line, style=style, markup=False)
        if verdict:
            why = f"chosen: {verdict.why}" if verdict.chosen else verdict.why
            console.print(Padding(Text(why, style), (0, 0, 0, 4)))


def _cells(verdict: Verdict) -> tuple[str, str, str, str]:
    """A time with ~ is predicted, and not measured by ``tightwire tune``."""
    measured = verdict.measured_us
    return (
        verdict.algorithm,
        f"~{verdict.predicted_us:.0f}" if measured is None else f"{measured:.0f}",
        format_bytes(verdict.wire_bytes),
        "exact" if verdict.error == 0 else f"{verdict.error:.2g}",
    )


def _as_data(decision: CommDecision, explained: Sequence[Explained]) -> dict[str, Any]:
    setting = decision.setting
    return {
        "setting": {name: getattr(setting, name) for name in setting.__struct_fields__},
        "measured": decision.measured.date if decision.measured else None,
        "warning": decision.warning,
        "policy_warning": decision.chooser.warning,
        "messages": [asdict(entry) for entry in explained],
    }
