"""Chooses the layout: what crosses the wire, for prompts and for tokens (docs/layouts.md); refuses what it cannot do yet."""

from collections.abc import Sequence

from msgspec.structs import replace

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.host import available_host_bytes
from tightwire.comm.link.wire import LinkFacts
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.open import Checkpoint, fingerprint
from tightwire.model.stages import StagePlan, divide_layers
from tightwire.model.weights.formats import WeightFormats
from tightwire.option import flag_of
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan import layout_table
from tightwire.server.plan.comm_decision import decide_sums
from tightwire.server.plan.host_rates import measure_rates
from tightwire.server.plan.rank_setup import LayoutChoice
from tightwire.server.plan.setting import DecidedSetting


def describe_layout(stages: StagePlan | None, choice: LayoutChoice | None) -> str:
    """The layout in one line, with the reason if it was chosen."""
    chosen = "" if choice is None else f"; chosen: {choice.why}"
    if stages is None:
        return f"tensor{chosen}"
    layers = ", ".join(f"{first} to {stop - 1}" for first, stop in stages.layers)
    if stages.pipeline:
        return f"pipeline: all rows pass the ranks in stages of layers {layers}; nothing is summed{chosen}"
    return f"hybrid: prompts pass the ranks in stages of layers {layers}; tokens are computed together{chosen}"


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
    for option, why in _obstacles(config, model, decided, prepared, layout):
        raise ValueError(f"--layout {layout} does not combine with {option}: {why}; leave one of them out")
    codec = parse_codec(parallel.stage_codec)
    if model.hidden_size % codec.group_elems:
        raise ValueError(
            f"--stage-codec {parallel.stage_codec}: a row has {model.hidden_size} numbers, which are not whole groups of "
            f"{codec.group_elems}, so a text would depend on its neighbours; give {parallel.stage_codec.split('-')[0]}-g64 or -g32"
        )
    if layers:
        return StagePlan(layers, pipeline=layout == "pipeline")
    shares = parallel.tp_split or [1.0] * parallel.tp
    if layout == "hybrid":
        return divide_layers(model.num_layers, shares)
    # The last stage also reads the head for every token.
    outer = layout_table.outer_bytes(inputs := layout_table.memory_inputs(config, model, formats, decided))
    last = outer.get("head", outer["embedding"])
    return replace(divide_layers(layout_table.layer_bytes(inputs), shares, last=last), pipeline=True)


def choose_auto(
    config: ServeConfig, checkpoint: Checkpoint, formats: WeightFormats, link: LinkFacts, room: Sequence[int]
) -> LayoutChoice:
    """Choose the layout that is predicted to answer soonest, of those that work and fit; this host is measured for seconds.

    ``room``: the memory of each host; empty: the ranks share this one's.
    """
    parallel, model = config.parallel, checkpoint.config
    asked = decide_sums(config, model, link, fingerprint(checkpoint))
    given = config, model, asked.decided, checkpoint.prepared is not None
    against = {layout: _obstacles(*given, layout) for layout in ("hybrid", "pipeline")}
    if all(against.values()):
        option, why = against["hybrid"][0]
        return LayoutChoice("tensor", f"hybrid does not combine with {option}: {why}")
    if parallel.allreduce != "auto" or parallel.allreduce_extra:
        return LayoutChoice("tensor", "AllReduces are named, and stages sum no prompts")
    if parallel.tp != (config.hosts.nnodes or parallel.wire_nodes):
        return LayoutChoice("tensor", "layouts are predicted for one rank on each host")
    split, most = parallel.tp_split or (1.0,) * parallel.tp, config.weights.device_memory
    inputs = layout_table.memory_inputs(config, model, formats, asked.decided)
    own = measure_rates(inputs, layout_table.work_of(inputs), 1 if room else parallel.tp)
    rates = [own.scaled(share / split[0]) for share in split]  # hosts are as fast as their shares say
    room = [min(each, most or each) for each in room or [available_host_bytes() // parallel.tp] * parallel.tp]
    rows = layout_table.compare_layouts(asked, inputs, link, rates, room, parallel.tp_split)
    try:
        best, why = layout_table.choose_layout([row for row in rows if not against.get(row.times.layout)])
    except ValueError as error:
        return LayoutChoice("tensor", str(error))
    return LayoutChoice(best.times.layout, why, best.stages)


def _obstacles(
    config: ServeConfig, model: LlamaConfig, decided: DecidedSetting, prepared: bool, layout: str
) -> list[tuple[str, str]]:
    """Return what hybrid or pipeline does not work with, and why. ``prepared``: the model is a prepared folder."""
    parallel, engine, weights = config.parallel, config.engine, config.weights.weights
    few = f"a stage has a layer or more, and the model has {model.num_layers}"
    given = [
        (parallel.tp == 1, "--tp 1", "a stage is a rank, and there is one"),
        (parallel.dp > 1, f"--dp {parallel.dp}", "the ranks of a replica are the stages of one"),
        (decided.setting.device != "cpu", "--device cuda", "stages run on CPUs"),
        (weights not in ("auto", "resident"), f"--weights {weights}", "the layers of a stage stay in memory"),
        (engine.kv_offload, "--kv-offload", "a stage has its keys and values in memory"),
        (engine.plan_ahead == "on", "--plan-ahead on", "several steps are under way already"),
        (config.adapters.lora or config.adapters.lora_dir, "--lora", "a stage's whole layers have no adapters"),
        (prepared, "a prepared folder", "it has no whole layers, which a stage computes"),
        (parallel.tp > model.num_layers, f"--tp {parallel.tp}", few),
    ]
    if layout == "hybrid":
        cached = engine.prefix_cache == "all"
        given.append((cached, "--prefix-cache all", "a stage has no keys and values of generated tokens"))
    else:
        drafts, transport, sums = engine.speculation, parallel.transport, "nothing is summed"
        given += [
            (drafts != "none", f"--speculation {drafts}", "drafts would wait for the last stage"),
            (transport not in ("auto", "sockets"), f"--transport {transport}", "stages use sockets"),
            (parallel.overlap == "on", "--overlap on", sums),
        ]
        for option in ("allreduce", "allreduce_decode", "comm_error_budget", "allreduce_extra"):
            value = getattr(parallel, option)
            given.append((value not in ("auto", None, ()), f"{flag_of(option)} {value}", sums))
    return [(option, why) for is_given, option, why in given if is_given]
