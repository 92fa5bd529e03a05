"""Prints what each layout would do on hosts that need not be there: ``tightwire explain MODEL --hosts N``."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import msgspec

from tightwire.comm.link.link import ETHERNET_PAYLOAD, parse_link
from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import LinkFacts, network_facts
from tightwire.comm.policy.schedule import HostRates
from tightwire.model.checkpoint.config import check_ranks
from tightwire.model.open import fingerprint, formats_of
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import planned_hosts
from tightwire.server.hosts.place import last_probe
from tightwire.server.plan.comm_decision import decide_sums
from tightwire.server.plan.host_rates import measure_rates
from tightwire.server.plan.layout_table import CONTEXT, Row, choose_layout, compare_layouts, memory_inputs, work_of
from tightwire.server.plan.layout_times import CROWD, PROMPTS
from tightwire.server.plan.run_plan import open_draft, open_model
from tightwire.server.plan.setting import decide_setting, obstacles
from tightwire.sizes import aligned, format_bytes

_ALL_REDUCES = ("flash-int8", "flash-int4")  # beside that of --allreduce
_ETHERNET_GBIT, _NUM_FASTER, _CABLE_S = (1, 2.5, 5, 10, 25, 40, 100, 200, 400), 2, 100e-6
_LEAST_GAIN = 1.05
_Table = Callable[[LinkFacts, int], list[Row]]  # (network, number of hosts)


def run(
    config: ServeConfig, num: int, memory: Sequence[int], rates: Sequence[HostRates], network: bool, as_json: bool
) -> None:
    """Print the table and what to change. ValueError: options are refused.

    ``memory``: none (not limited), one of all hosts, or one of each. ``rates``: the same; none: those of this machine.
    ``network``: as the last server has probed it, instead of the options' link.
    """
    link = last_probe() if network else _stated(config.parallel.link or "")
    config, checkpoint = open_model(config)
    model, formats = checkpoint.config, formats_of(checkpoint, config.model.quantization)
    check_ranks(model.num_heads, num, "--hosts")
    plain = replace(config, parallel=ParallelOptions(tp=num, layout="pipeline", stages=num))
    given = config.model.device, model, checkpoint.prepared is not None
    against = {layout: why for layout in ("hybrid", "pipeline") if (why := obstacles(plain, layout, *given))}
    draft = open_draft(_on(config, num), checkpoint)
    if not rates:
        own = memory_inputs(_on(config, num), model, formats, decide_setting(_on(config, num), model))
        rates = (measure_rates(own, work_of(own)),)

    def table(link: LinkFacts, num: int) -> list[Row]:
        there, hosts, room = _on(config, num), [*islice(cycle(rates), num)], [*islice(cycle(memory), num)]
        asked = decide_sums(there, model, link, fingerprint(checkpoint))
        inputs = memory_inputs(there, model, formats, asked.decided, draft)
        found = compare_layouts(asked, inputs, link, hosts, room, there.parallel.tp_split)
        return [row for row in found if row.times.layout not in against]

    rows = table(link, num)
    alike = max(len(memory), len(rates)) < 2 and config.parallel.tp_split is None
    best, why, changes = None, "", list[str]()
    try:
        best, why = choose_layout(rows)
        changes = list(_changes(table, link, num, best, 2 * num if alike and 2 * num <= model.num_heads else 0))
    except ValueError as error:
        why = str(error)
    if as_json:
        found = {"hosts": num, "link": link, "rates": rates, "layouts": rows, "best": best and best.name}
        found |= {"why": why, "changes": changes}
        sys.stdout.write(json.dumps(msgspec.to_builtins(found, str_keys=True)) + "\n")
        return
    left_out = [f"no {layout}: it does not combine with {why[0][0]}, {why[0][1]}" for layout, why in against.items()]
    cache = config.engine.kv_dtype(decide_setting(_on(config, num), model).dtype)
    context, mbit, us = min(CONTEXT, model.max_positions), 8e-6 * (link.measured_bytes_per_s or 0), 1e6 * link.latency_s
    sys.stdout.write(
        f"{checkpoint.name} on {num} hosts, predicted. Memory: weights, {cache} KV cache for {context} tokens, working space.\n"
        f"Rates of a host: {'; '.join(map(str, rates))}. Network: {mbit:.4g} Mbit/s of payload, {us:.0f} us one way.\n\n"
    )
    verdict = f"best: {best.times.layout}: {why}" if best else why
    sys.stdout.writelines(f"{line}\n" for line in [*_lines(rows, best), "", verdict, *changes, *left_out])


def _stated(text: str) -> LinkFacts:
    """The facts of a cable that is not there. ValueError: without a rate."""
    link = parse_link(text)
    if link.bytes_per_s is None:
        raise ValueError(f"--link {text} has no rate; write it as 1gbit,latency=100us")
    rate = link.bytes_per_s * (1.0 if "pcie" in link.name else ETHERNET_PAYLOAD)
    return network_facts([PairFacts((0, 1), 2 * link.latency_s, 0.0, rate)])


def _on(config: ServeConfig, num: int) -> ServeConfig:
    """The options of a server on ``num`` hosts."""
    extra = tuple(name for name in _ALL_REDUCES if name != config.parallel.allreduce)
    parallel = replace(config.parallel, tp=num, link=None, layout="auto", allreduce_extra=extra)
    return planned_hosts(replace(config, parallel=parallel), num)


def _changes(table: _Table, link: LinkFacts, num: int, best: Row, more: int) -> Iterator[str]:
    """What would make a request faster, and by how much. ``more``: hosts to try, or 0."""
    latency, rate = f"latency={1e6 * link.latency_s:.1f}us", link.measured_bytes_per_s or 0.0
    faster = [gbit for gbit in _ETHERNET_GBIT if ETHERNET_PAYLOAD * gbit * 1e9 / 8 > 1.2 * rate][:_NUM_FASTER]
    others = [(f"{gbit:g} GbE", _stated(f"{gbit}gbit,{latency}"), num) for gbit in faster]
    if link.latency_s > 2 * _CABLE_S:
        others.append(("a cable (100 us)", msgspec.structs.replace(link, latency_s=_CABLE_S), num))
    others += [(f"{more} hosts", link, more)] if more else []
    for name, changed, hosts in others:
        row, _ = choose_layout(table(changed, hosts))
        if (gain := best.times.request_s / row.times.request_s) >= _LEAST_GAIN:
            yield f"{name} would bring {gain:.1f}x, with {row.times.layout}"


def _lines(rows: Sequence[Row], best: Row | None) -> list[str]:
    cells = [["", *(f"TTFT({length}) ms" for length in PROMPTS), "ms a token", f"tokens/s at {CROWD}", "memory a host"]]
    for row in rows:
        numbers = [f"{1e3 * row.times.ttft_s[length]:,.0f}" for length in PROMPTS]
        numbers += [f"{1e3 * row.times.token_s:,.1f}", f"{row.times.crowd_tokens_per_s:,.0f}"]
        memory = format_bytes(max(row.host_bytes)) + ("" if row.fits else ", does not fit")
        cells.append([("* " if row is best else "  ") + row.name, *numbers, memory])
    return aligned(cells)
