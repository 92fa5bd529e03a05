"""Plans as the measured server of ``bench ttft`` will, and checks that the prompts fit."""

from dataclasses import dataclass, fields, replace
from typing import Any

from tightwire.bench.ttft.options import AUTO, TtftOptions
from tightwire.bench.ttft.proof import Proof
from tightwire.comm.policy.choose import Chooser
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import choose_formats
from tightwire.server.config.hosts import HostOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import resolve_hosts
from tightwire.server.plan.run_plan import decide

_NOT_KEPT = ("config", "output", "label", "json")  # in the result's options


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Facts known before the server starts. ``config``: ``auto`` is the default AllReduce, the others are on request."""

    config: ServeConfig
    proof: Proof
    chooser: Chooser
    known: dict[str, Any]  # for the result


def find_facts(options: TtftOptions) -> ServerFacts:
    """Plan as the server does; ValueError for a refused model or option, or prompts that do not fit."""
    config = _server_config(options)
    checkpoint = open_checkpoint(config.model.model, config.model.seed)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, config.model.quantization)
    decision = decide(config, checkpoint.config, formats)
    plan, parallel = decision.plan, config.parallel
    assert decision.comm is not None, "there are at least two ranks"
    longest = max(options.prompt_lens) + options.output_len
    if longest > plan.max_model_len:
        raise ValueError(
            f"--prompt-lens {max(options.prompt_lens)} and --output-len {options.output_len} make {longest} tokens, but the "
            f"server's context is {plan.max_model_len}; lower them, or raise --max-model-len"
        )
    blocks = max(options.concurrency) * decision.budget.shape.blocks(longest)
    if blocks > plan.num_blocks:
        raise ValueError(
            f"--concurrency {max(options.concurrency)} with {longest} tokens each needs {blocks} KV blocks, but there are "
            f"{plan.num_blocks}, so requests would queue; raise --kv-cache-memory"
        )
    hidden_size = checkpoint.config.hidden_size
    return ServerFacts(
        config=config,
        proof=Proof(
            num_layers=checkpoint.config.num_layers,
            row_elems=hidden_size,
            dtype=plan.sum_dtype,
            step_tokens=config.engine.max_num_batched_tokens,
            overlap=plan.overlap,
            world_size=parallel.tp,
            num_nodes=parallel.nodes,
        ),
        chooser=decision.comm.chooser,
        known={
            "model": checkpoint.name,
            "dtype": plan.dtype,
            "weights": formats.name or plan.dtype,
            "device": plan.device,
            "tp": parallel.tp,
            "nodes": parallel.nodes,
            "num_layers": checkpoint.config.num_layers,
            "hidden_size": hidden_size,
            "seed": config.model.seed,
            "options": {
                **{own.name: getattr(options, own.name) for own in fields(TtftOptions) if own.name not in _NOT_KEPT},
                "algorithms": options.arms,
                "baseline": options.baseline_name,
                "link": options.config.parallel.link,
            },
        },
    )


def _server_config(options: TtftOptions) -> ServeConfig:
    others = () if options.layouts else tuple(dict.fromkeys(name for name in options.arms if name != AUTO))
    layout = "hybrid" if options.layouts else "tensor"
    config = replace(
        options.config,
        parallel=replace(options.config.parallel, layout=layout, allreduce=AUTO, allreduce_extra=others),
        engine=replace(options.config.engine, prefix_cache="none"),  # no prompt is used twice
    )
    if options.nnodes == 1:
        return config
    hosts = HostOptions(nnodes=options.nnodes, node_rank=0, master_addr="10.0.0.1")
    parallel = replace(config.parallel, link=None)  # the wire is the hosts'
    return resolve_hosts(replace(config, parallel=parallel, hosts=hosts), {})[0]
