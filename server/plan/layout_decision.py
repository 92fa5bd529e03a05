"""Chooses the layout: what crosses the wire, for prompts and for tokens (docs/layouts.md); refuses what it cannot do yet."""

from collections.abc import Iterator

from tightwire.comm.codec.codec import parse_codec
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.stages import StagePlan, divide_layers
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.setting import DecidedSetting


def describe_layout(config: ServeConfig, stages: StagePlan | None) -> str:
    """One line for the details of the ready message."""
    if stages is None and config.parallel.layout == "auto" and config.hosts.several:
        compared = f"`tightwire explain {config.model.model} --hosts {config.hosts.nnodes} --network`"
        return f"layout: tensor, {compared} predicts the others"
    if stages is None:
        return "layout: tensor"
    layers = ", ".join(f"{first} to {stop - 1}" for first, stop in stages.layers)
    return f"layout: hybrid: prompts pass the ranks in stages of layers {layers}; tokens are computed together"


def decide_stages(config: ServeConfig, model: LlamaConfig, decided: DecidedSetting) -> StagePlan | None:
    """Resolve ``--layout``: the stages of prompts, or None if all ranks compute prompts together.

    ValueError: it does not combine with another option, named, or with the model.
    """
    parallel = config.parallel
    if parallel.layout in ("auto", "tensor"):
        return None
    for option, why in _obstacles(config, decided):
        raise ValueError(f"--layout hybrid does not combine with {option}: {why}; leave one of them out")
    codec = parse_codec(parallel.stage_codec)
    if model.hidden_size % codec.group_elems:
        raise ValueError(
            f"--stage-codec {parallel.stage_codec}: a row has {model.hidden_size} numbers, which are not whole groups of "
            f"{codec.group_elems}, so a text would depend on its neighbours; give {parallel.stage_codec.split('-')[0]}-g64 or -g32"
        )
    shares = parallel.tp_split or [1.0] * parallel.tp
    return divide_layers(model.num_layers, shares)


def _obstacles(config: ServeConfig, decided: DecidedSetting) -> Iterator[tuple[str, str]]:
    """Yield the options that a hybrid layout does not work with, and why."""
    parallel, engine = config.parallel, config.engine
    if parallel.tp == 1:
        yield "--tp 1", "a stage is a rank, and there is one"
    if parallel.dp > 1:
        yield f"--dp {parallel.dp}", "the ranks of a replica are the stages of one"
    if decided.setting.device != "cpu":
        yield "--device cuda", "stages run on CPUs"
    if config.weights.weights not in ("auto", "resident"):
        yield f"--weights {config.weights.weights}", "the layers of a stage stay in memory"
    if engine.kv_offload:
        yield "--kv-offload", "a stage hands its keys and values over in memory"
    if engine.prefix_cache == "all":
        yield "--prefix-cache all", "a stage has no keys and values of generated tokens"
    if engine.plan_ahead == "on":
        yield "--plan-ahead on", "several steps are under way already"
    if config.adapters.lora or config.adapters.lora_dir:
        yield "--lora", "a stage's whole layers have no adapters"
