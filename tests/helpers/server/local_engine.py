"""A whole engine in this process: ranks are threads, joined by in-process collectives. For tests of model and engine."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from helpers.comm.fixed_policy import fixed_policy, make_arms
from helpers.server.fake_runner import OneRank
from torch import Tensor

from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.lane import Pending
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.policy.rules import Policy
from tightwire.model.adapters.peft import open_adapter
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.rows import Column
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.stages import StagePlan
from tightwire.model.step import StepPlan, make_plan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.lora import AdapterTable
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.messages import AddRequest, Output


class _LocalRunner(OneRank):
    """Rank 0's runner and the inboxes of the others."""

    def __init__(
        self, runner: ModelRunner, inboxes: "Sequence[queue.SimpleQueue[StepPlan | bytes | None]]", tp: int
    ) -> None:
        self._runner, self._inboxes, self._tp = runner, inboxes, tp
        self.execute = runner.execute

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        for rank, inbox in enumerate(self._inboxes, start=1):
            inbox.put(plans[rank // self._tp])

    def choose(self, plans: Sequence[StepPlan], logits_RV: Tensor | None, banned: Sequence[bytes]) -> Tensor | Pending:
        for rank, inbox in enumerate(self._inboxes, start=1):
            if bits := banned[rank // self._tp]:
                inbox.put(bits)
        results = self._runner.choose(plans[0], logits_RV, banned[0])
        assert results is not None
        return results


@dataclass(frozen=True)
class LocalEngine:
    engine: Engine
    runners: list[ModelRunner]
    groups: list[Group]


@contextmanager
def local_engine(
    checkpoint: Checkpoint,
    *,
    tp: int = 1,
    dp: int = 1,
    shares: Sequence[float] | None = None,
    all_reduce: str | Policy | Mapping[str, Policy] = "one-shot",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    quantization: str = "auto",
    max_model_len: int = 2048,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    prefix_cache: str = "prompts",
    drafter: Drafter | None = None,
    overlap: bool = False,
    weight_plan: WeightPlan = EVERYTHING_RESIDENT,
    most_rows: int | None = None,
    plan_ahead: bool = False,
    buffer_blocks: int | None = None,
    bounded: bool = True,
    adapters: Sequence[Path] = (),
    stages: StagePlan | None = None,
    stage_codec: str = "none",
    grammars: GrammarMasks | None = None,
    device: torch.device | None = None,
    graphs_up_to: int = 0,
) -> Iterator[LocalEngine]:
    """An engine over ``dp`` replicas of ``tp`` ranks; followers run in threads until the block ends.

    ``all_reduce``: a name, a policy, or several policies by the names that requests ask for them. ``buffer_blocks``: the KV
    cache is offloaded, and steps have at most so many blocks. ``bounded``: layers with a window free blocks. ``adapters``: folders; ids count from 1, and a slot stays free.
    ``device``: of ranks that sum nothing; None: the CPU. ``stages``: prompts, or in a pipeline all rows, pass these; in hybrid a request whose policy is the name and "/tensor" does without.
    """
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, quantization)
    pipeline, each = stages is not None and stages.pipeline, 1 if stages is None else stages.ranks_each
    num_summing = each if pipeline else tp
    layout = split_model(config, formats, num_summing, shares)
    by_stage = Layout(shards=split_model(config, formats, each).shards * (tp // each))
    if pipeline:
        layout = by_stage
    layer_groups = LayerGroups.of(config, bounded=bounded and buffer_blocks is None and stages is None)
    num_blocks = num_blocks or 4 * layer_groups.num * -(-max_model_len // block_size)
    worlds = in_process_groups(tp * dp) if dp > 1 else []
    ledgers = [world.ledger for world in worlds] or [Ledger() for _ in range(tp)]
    sizes = [num_summing] * (tp * dp // num_summing)
    groups = [
        group
        for number, size in enumerate(sizes)
        for group in in_process_groups(size, ledgers=ledgers[number * size : (number + 1) * size])
    ]
    groups = [group if device is None else replace(group, device=device) for group in groups]
    is_split = stages is not None and not pipeline and each > 1
    insides = [
        inside
        for first in range(0, tp if is_split else 0, each)
        for inside in in_process_groups(each, ledgers=ledgers[first : first + each])
    ]
    inside_arms = {"auto": fixed_policy("one-shot")}
    policy = fixed_policy(all_reduce) if isinstance(all_reduce, str) else all_reduce
    arms = policy if isinstance(policy, Mapping) else {"fixed": policy}
    stage_groups, beside_groups = _first_ranks(stages, tp), _first_ranks(stages, tp)
    if stages is not None and not pipeline:
        beside_groups = [*in_process_groups(tp)]
    runners = [
        build_runner(
            config,
            checkpoint.reader(),
            layout,
            RankGroups(
                group,
                routes=make_arms(arms, group) if num_summing > 1 else None,
                world=worlds[number] if worlds else None,
                stage=stages.stage_of(number % tp) if stages else 0,
                stages=stage_groups[number % tp],
                beside=beside_groups[number % tp],
                inside=insides[number] if insides else None,
                inside_routes=make_arms(inside_arms, insides[number]) if insides else None,
            ),
            RunnerOptions(
                dtype=dtype,
                kv_dtype=kv_dtype,
                max_model_len=max_model_len,
                num_blocks=num_blocks,
                block_size=block_size,
                groups=None if stages else layer_groups,
                buffer_blocks=buffer_blocks,
                formats=formats,
                overlap=overlap,
                weight_plan=weight_plan,
                most_rows=most_rows,
                adapters=AdapterRoom(len(adapters) + 1, 16) if adapters else None,
                stages=stages,
                parts=by_stage if stages and not pipeline else None,
                stage_codec=stage_codec,
                graphs_up_to=graphs_up_to,
            ),
        )
        for number, group in enumerate(groups)
    ]
    for slot, folder in enumerate(adapters):
        for runner in runners:
            assert runner.adapters is not None
            runner.adapters.load(slot, open_adapter(folder, config))
    inboxes: list[queue.SimpleQueue[StepPlan | bytes | None]] = [queue.SimpleQueue() for _ in runners[1:]]
    threads = [
        threading.Thread(target=_follow, args=pair, daemon=True) for pair in zip(runners[1:], inboxes, strict=True)
    ]
    for thread in threads:
        thread.start()

    try:
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=prefix_cache,
            max_step_blocks=buffer_blocks,
            groups=layer_groups,
            num_stages=stages.num_stages if stages else 1,
            pipeline=pipeline,
            num_policies=len(arms),
        )
        engine = Engine(
            runner=_LocalRunner(runners[0], inboxes, tp),
            sampler=Sampler(config.vocab_size, grammars),
            limits=limits,
            rules=RequestRules(
                vocab_size=config.vocab_size,
                max_model_len=max_model_len,
                policies=(*arms, *(f"{name}/tensor" for name in arms if stages and not pipeline)),
                eos_token_ids=frozenset(config.eos_token_ids),
                has_grammars=grammars is not None,
            ),
            drafter=drafter,
            plan_ahead=plan_ahead,
            num_replicas=dp,
            adapters=AdapterTable(len(adapters) + 1, {slot + 1: slot for slot in range(len(adapters))}),
        )
        yield LocalEngine(engine, runners, groups)
    finally:
        for inbox in inboxes:
            inbox.put(None)
        for thread in threads:
            thread.join(timeout=120)
        for runner in runners:
            runner.close()


def _first_ranks(stages: StagePlan | None, tp: int) -> list[Group | None]:
    """The group of each stage's first rank; None for the others."""
    found: list[Group | None] = [None] * tp
    if stages is not None:
        found[:: stages.ranks_each] = in_process_groups(stages.num_stages)
    return found


def _follow(runner: ModelRunner, inbox: "queue.SimpleQueue[StepPlan | bytes | None]") -> None:
    while (plan := inbox.get()) is not None:
        assert isinstance(plan, StepPlan)
        logits_RV = runner.execute(plan)
        banned = inbox.get() if plan.sampling.column(Column.MASKED).any() else b""
        assert isinstance(banned, bytes)
        runner.choose(plan, logits_RV, banned)


def run_to_end(engine: Engine) -> dict[str, list[Output]]:
    """Step until nothing is left; outputs by request."""
    outputs: dict[str, list[Output]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs.setdefault(output.id, []).append(output)
    return outputs


def continue_prompts(
    engine: Engine, prompts: Sequence[Sequence[int]], adapters: Sequence[int] | None = None, **params: Any
) -> list[list[int]]:
    """The tokens each prompt is continued with, all prompts running together; greedy unless ``params`` say else.

    ``adapters``: each prompt's adapter by id; 0: none.
    """
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **params})
    for index, prompt in enumerate(prompts):
        adapter = adapters[index] if adapters else 0
        engine.add(AddRequest(id=str(index), prompt_token_ids=list(prompt), params=settings, adapter=adapter))
    outputs = run_to_end(engine)
    return [[t for output in outputs[str(index)] for t in output.token_ids] for index in range(len(prompts))]


def prompt_logits(runner: ModelRunner, prompt: Sequence[int], block_size: int = 16) -> Tensor:
    """(T, V) logits at every position of one prompt, in one step of a group of one."""
    num_blocks = -(-len(prompt) // block_size)
    plan = make_plan(
        token_ids=prompt,
        query_lens=[len(prompt)],
        context_lens=[len(prompt)],
        block_tables=range(num_blocks),
        num_decode_rows=0,
        logit_rows=range(len(prompt)),
    )
    logits_TV = runner.execute(plan)
    assert logits_TV is not None
    return logits_TV


def greedy_text(model: Path, prompt: str, max_tokens: int, **options: Any) -> str:
    """The text that one rank in float32 continues ``prompt`` with, unless ``options`` of ``local_engine`` say else."""
    checkpoint = open_checkpoint(str(model))
    tokenizer = checkpoint.tokenizer()
    with local_engine(checkpoint, **{"max_model_len": 256, **options}) as local:
        (token_ids,) = continue_prompts(local.engine, [tokenizer.encode(prompt)], max_tokens=max_tokens)
    return tokenizer.decode(token_ids)
