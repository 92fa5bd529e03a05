"""What is known before the server is started: the model's sizes, the ranks, and that what was asked can fit."""

from dataclasses import dataclass, replace

from tightwire.bench.ttft.options import TtftOptions, is_policy, policy_path
from tightwire.bench.ttft.proof import ModelShape, Proof
from tightwire.bench.ttft.wire import WireFormulas
from tightwire.comm.all_reduce.entry import ELEM_BYTES
from tightwire.comm.policy.choose import Chooser
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import choose_formats
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.run_plan import check_all_reduce_names, decide


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """``config``: the server's, the baseline its own AllReduce and the others on request."""

    config: ServeConfig
    model: str
    dtype: str
    weights: str  # as they are kept, such as Q4_1+Q8_0
    device: str
    hidden_size: int
    proof: Proof
    chooser: Chooser


def find_facts(options: TtftOptions) -> Facts:
    """Open the model and decide what will run, as the server will.

    Raises:
        ValueError: the model or an option is refused, or prompts and answers do not fit.
    """
    config = _config(options)
    check_all_reduce_names(config.parallel)
    checkpoint = open_checkpoint(config.model.model, config.model.seed)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, config.model.quantization)
    decision = decide(config, checkpoint.config, formats)
    plan, parallel = decision.plan, config.parallel
    assert decision.comm is not None, "there are at least two ranks"
    longest = max(options.prompt_lens) + options.output_len
    if longest > plan.max_model_len:
        raise ValueError(
            f"--prompt-lens {max(options.prompt_lens)} and --output-len {options.output_len} make {longest} tokens, and "
            f"the model's context here is {plan.max_model_len}; shorten them, or raise --max-model-len if that is what "
            "limits it"
        )
    blocks = max(options.concurrency) * -(-longest // config.engine.block_size)
    if blocks > plan.num_blocks:
        raise ValueError(
            f"--concurrency {max(options.concurrency)} with {longest} tokens each needs {blocks} KV blocks, and there are "
            f"{plan.num_blocks}, so the queue would be measured; raise --kv-cache-memory"
        )
    elem_bytes, hidden_size = ELEM_BYTES[plan.dtype], checkpoint.config.hidden_size
    return Facts(
        config=config,
        model=checkpoint.name,
        dtype=plan.dtype,
        weights=formats.name or plan.dtype,
        device=plan.device,
        hidden_size=hidden_size,
        proof=Proof(
            ModelShape(
                num_layers=checkpoint.config.num_layers,
                row_bytes=hidden_size * elem_bytes,
                step_tokens=config.engine.max_num_batched_tokens,
                overlap=plan.overlap,
            ),
            WireFormulas(
                world_size=parallel.tp, num_nodes=parallel.nodes, wire_nodes=parallel.wire_nodes, elem_bytes=elem_bytes
            ),
        ),
        chooser=decision.comm.chooser,
    )


def _config(options: TtftOptions) -> ServeConfig:
    own = options.baseline_name
    others = tuple(dict.fromkeys(name for name in options.algorithms if name != own))
    sums = {"comm_policy": policy_path(own)} if is_policy(own) else {"allreduce": own}
    return replace(
        options.config,
        parallel=replace(options.config.parallel, allreduce_extra=others, **sums),
        # No prompt is used twice, but the answers that are checked come from prompts that were timed.
        engine=replace(options.config.engine, prefix_cache="none"),
    )
