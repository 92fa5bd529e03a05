"""Chooses the layout: what crosses the wire, for prompts and for tokens (docs/layouts.md); refuses what it cannot do yet."""

from collections.abc import Sequence

from msgspec.structs import replace

from tightwire.comm.group.host import available_host_bytes
from tightwire.comm.link.wire import LinkFacts
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.open import Checkpoint, fingerprint
from tightwire.model.stages import StagePlan, divide_layers
from tightwire.model.weights.formats import WeightFormats
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan import layout_table
from tightwire.server.plan.comm_decision import decide_sums
from tightwire.server.plan.host_rates import measure_rates
from tightwire.server.plan.rank_setup import LayoutChoice
from tightwire.server.plan.setting import DecidedSetting, check_layout, obstacles


def describe_layout(stages: StagePlan | None, choice: LayoutChoice | None) -> str:
    """The layout in one line, with the reason if it was chosen."""
    chosen = "" if choice is None else f"; chosen: {choice.why}"
    if stages is None:
        return f"tensor{chosen}"
    layers = ", ".join(f"{first} to {stop - 1}" for first, stop in stages.layers)
    rows, tokens = "pipeline: all rows", "" if stages.ranks_each > 1 else "; nothing is summed"
    if not stages.pipeline:
        rows, tokens = "hybrid: prompts", "; tokens are computed together"
    if stages.ranks_each == 1:
        return f"{rows} pass the ranks in stages of layers {layers}{tokens}{chosen}"
    how = f"{stages.ranks_each} ranks with layers {layers}; the ranks of a stage sum in memory"
    return f"{rows} pass stages of {how}{tokens}{chosen}"


def decide_stages(
    config: ServeConfig,
    model: LlamaConfig,
    formats: WeightFormats,
    decided: DecidedSetting,
    prepared: bool,
    layers: tuple[tuple[int, int], ...] = (),
) -> StagePlan | None:
    """Return the stages of prompts or of all rows, or None if all ranks compute all rows together, as ``auto`` does without a choice.

    ``layers``: of each stage, if they are chosen. ValueError: the layout does not combine with an option, named, or the model.
    """
    parallel = config.parallel
    if (layout := parallel.layout) not in ("hybrid", "pipeline"):
        return None
    check_layout(config, decided.setting.device, model, prepared)
    shares, each = shares_of(parallel, parallel.num_stages), parallel.tp // parallel.num_stages
    if layers:
        stages = StagePlan(layers)
    elif layout == "hybrid":
        stages = divide_layers(model.num_layers, shares)
    else:  # the last stage also reads the head for every token
        outer = layout_table.outer_bytes(inputs := layout_table.memory_inputs(config, model, formats, decided))
        stages = divide_layers(layout_table.layer_bytes(inputs), shares, last=outer.get("head", outer["embedding"]))
    return replace(stages, pipeline=layout == "pipeline", ranks_each=each)


def shares_of(parallel: ParallelOptions, num_parts: int) -> list[float]:
    """The speed of each of the replica's equal parts: as ``--tp-split`` states that of their ranks."""
    split, each = parallel.tp_split or (1.0,) * parallel.tp, parallel.tp // num_parts
    return [sum(split[first : first + each]) for first in range(0, parallel.tp, each)]


def choose_auto(
    config: ServeConfig,
    checkpoint: Checkpoint,
    formats: WeightFormats,
    link: LinkFacts,
    room: Sequence[int],
    draft: Checkpoint | None = None,
) -> LayoutChoice:
    """Choose the layout that fits and is predicted to answer soonest. Measures for seconds. ``room``: see ``Hosts.settle``."""
    parallel, model = config.parallel, checkpoint.config
    asked = decide_sums(config, model, link, fingerprint(checkpoint))
    given = asked.decided.setting.device, model, checkpoint.prepared is not None
    if given[0] == "cuda":
        return LayoutChoice("tensor", "the predicted times are of CPUs; on GPUs there is --layout pipeline")
    against = {layout: obstacles(config, layout, *given) for layout in ("hybrid", "pipeline")}
    if all(against.values()):
        option, why = against["hybrid"][0]
        return LayoutChoice("tensor", f"hybrid does not combine with {option}: {why}")
    if parallel.allreduce != "auto" or parallel.allreduce_extra:
        return LayoutChoice("tensor", "AllReduces are named, and stages sum no prompts")
    num_hosts, most = parallel.wire_nodes, config.weights.device_memory
    shares, each = shares_of(parallel, num_hosts), parallel.tp // num_hosts
    inputs = layout_table.memory_inputs(config, model, formats, asked.decided, draft)
    own = measure_rates(inputs, layout_table.work_of(inputs), 1 if room else num_hosts)
    rates = [own.scaled(share / shares[0]) for share in shares]  # hosts are as fast as their shares say
    room = room or [available_host_bytes() // num_hosts] * num_hosts
    room = [min(free, most * each) if most else free for free in room]
    rows = layout_table.compare_layouts(asked, inputs, link, rates, room, shares if parallel.tp_split else None)
    try:
        best, why = layout_table.choose_layout([row for row in rows if not against.get(row.times.layout)])
    except ValueError as error:
        return LayoutChoice("tensor", str(error))
    return LayoutChoice(best.times.layout, why, best.stages)
