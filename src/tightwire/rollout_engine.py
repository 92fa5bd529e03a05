"""The server's engine inside the ranks of the trainer: it answers the prompts of GRPO with the newest adapter, or
those of a distillation.

Each rank has its own: the base model's weights as the checkpoint has them, a paged cache, and room for two versions of the adapter.
Matrices that the trainer on this rank has whole, as the engine would read them, are the trainer's memory. An answer ends under
the version that it began with. With ``rollout.tp`` several ranks share the weights and the cache as those of a
server do: all answer the prompts of all, and each plans the same steps, because steps depend on the requests alone.
With ``rollout.weights: partition`` each answers its own prompts, and gathers the trainer's parts of a layer when it is computed.
A rank that has answered its prompts takes part in the gathers until all have.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.protocols import Transport
from tightwire.comm.transport.peer_access import host_identity
from tightwire.comm.transport.process_group import GlooTransport
from tightwire.comm.transport.segment import make_segment, why_unusable
from tightwire.comm.transport.shared_memory import SharedMemoryTransport
from tightwire.kernels.spec.gguf_blocks import PackedFormat
from tightwire.model.adapters.peft import AdapterFile
from tightwire.model.adapters.product import AdapterRoom, adapter_bytes
from tightwire.model.cache.kv_cache import layer_block_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ChatTemplateError, ModelError
from tightwire.model.checkpoint.tensors import StackedParts
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Shard
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler as TokenSampler
from tightwire.model.weights import NUM_BUFFERS
from tightwire.model.weights.formats import Fused, WeightFormats, all_tensors, choose_formats, split_model
from tightwire.recorded_answers import Prompt, Recording
from tightwire.rollout_weights import NUM_VERSIONS, OneRank, sharing
from tightwire.server.config.limits import BLOCK_SIZE, Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.lora import AdapterTable
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.messages import AddRequest, Output
from tightwire.training.config.sharding import GroupShape
from tightwire.training.config.tree import ModelConfig, TrainConfig
from tightwire.training.data.chats import ChatEncoder, PromptPacker
from tightwire.training.data.documents import DataError, Documents, RunData, fingerprint_of
from tightwire.training.engine.engine import Engine as TrainingEngine
from tightwire.training.engine.flat_parameters import ENDS, NORMS, BucketPlan
from tightwire.training.engine.options import engine_options
from tightwire.training.engine.shards import form_of
from tightwire.training.ranks.groups import Control
from tightwire.training.start.answers import Answer
from tightwire.training.start.model import StartingModel, config_of, open_starting_model, plan_model

_log = logging.getLogger(__name__)

_AT_ONCE = 64  # answers that a rank samples at a time
_QUESTION_TOKENS = 64  # longest question that a target asks itself
_ASKED = "tightwire-asks"  # stands for a question in a rendered chat


class RolloutEngine:
    """A ``training.run.rollouts.Sampler``."""

    def __init__(
        self,
        start: StartingModel,
        config: TrainConfig,
        group: Group,
        most_sequences: int,
        trainer: TrainingEngine | None = None,
    ) -> None:
        """``group``: the ranks that answer together. ``most_sequences``: theirs, at once. ``trainer``: on this rank."""
        model, most_tokens = start.config, config.data.sequence_tokens
        scaling = model.rope_scaling
        if scaling.long_factors and most_tokens > scaling.original_max_positions:
            raise ValueError(
                f"data.sequence_tokens={most_tokens}: beyond {scaling.original_max_positions} tokens {start.name} has other rotary "
                "factors, which the engine would use for all sequences and the trainer for longer ones only; give at most "
                f"{scaling.original_max_positions}"
            )
        self._config, self._lora, self._version = model, start.lora, 0
        self._lane, self._group = group, _through_memory(group)
        limits = _limits(config, model, most_sequences)
        self._trainer, self._others = trainer, None  # the ranks with parts of the same layers
        self._rank = OneRank(start, config, self._group, limits, trainer)
        if trainer is not None and (parts := self._rank.parts):
            self._others = Control(sharing(trainer, trainer.groups.main, parts))
            self._rank.settle()
        elif trainer is not None and config.rollout.weights == "partition" and trainer.groups.main.rank == 0:
            _log.warning("rollout.weights=partition changes nothing here: each rank has all frozen matrices")
        self._engine = Engine(
            runner=self._rank,
            sampler=TokenSampler(model.vocab_size),
            limits=limits,
            rules=RequestRules(
                vocab_size=model.vocab_size,
                max_model_len=most_tokens,
                eos_token_ids=frozenset(start.tokenizer.eos_token_ids),
            ),
            adapters=AdapterTable(NUM_VERSIONS if start.lora else 0),
        )

    @property
    def transport(self) -> Transport:
        """Between the ranks that answer together."""
        return self._group.transport

    @property
    def bytes_sent(self) -> int:
        gathered = 0 if self._others is None or self._trainer is None else self._trainer.bytes_sent
        return self._group.bytes_sent + gathered

    @torch.inference_mode()
    def load(self, matrices: Mapping[str, Tensor]) -> None:
        modules = {name.removesuffix(".lora_A.weight") for name in matrices if name.endswith(".lora_A.weight")}
        table, products = self._engine.adapters, self._rank.runner.adapters
        assert products is not None and self._lora is not None, "only a run of an adapter loads one"
        table.unload(self._version)
        self._version += 1
        own = AdapterFile(
            folder=Path(f"version-{self._version}"),
            modules=dict.fromkeys(modules, (self._lora.rank, self._lora.scale)),
            parts=StackedParts(self._config),
            reader=_Matrices(matrices),  # pyright: ignore[reportArgumentType]
        )
        products.load(table.assign(self._version), own)

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[tuple[list[int], int]],
        most_tokens: int,
        temperature: float = 1.0,
        top: int | None = None,
    ) -> list[Answer]:
        ranks = Control(self._group).gather([*prompts])
        asked = [each for of_rank in ranks for each in of_rank]
        tops: list[list[Any]] = [[] for _ in asked]
        answers = [Answer([], [], False, own) for own in tops]
        self._rank.num_top = top or 0
        for number, (tokens, seed) in enumerate(asked):
            params = SamplingParams(
                max_tokens=most_tokens, temperature=temperature, seed=seed, logprobs=0 if top is None else None
            )
            self._engine.add(AddRequest(id=str(number), prompt_token_ids=tokens, params=params, adapter=self._version))
        while self._goes_on():
            outputs = self._step()
            for output in outputs:
                if output.finish_reason in ("error", "refused"):
                    raise ModelError(f"the engine did not answer a prompt: {output.message}")
                place = int(output.id)
                answers[place].token_ids.extend(output.token_ids)
                answers[place].logprobs.extend(score.logprob for score in output.logprobs or ())
                if output.finish_reason == "stop":
                    answers[place] = answers[place]._replace(ended=True)
            if top:  # a step has a row of logits for each of its tokens, in this order
                told = [int(output.id) for output in outputs if output.token_ids]
                for place, *row in zip(told, *self._rank.take_top(), strict=True):
                    tops[place].append(row)
        if self._others is not None:
            self._rank.settle()
        first = sum(map(len, ranks[: self._group.rank]))
        return answers[first : first + len(prompts)]

    def _goes_on(self) -> bool:
        """Whether this rank has a step to run, or to gather for."""
        has_work = self._engine.has_work()
        return has_work if self._others is None else any(own for (own,) in self._others.gather_numbers(has_work))

    def _step(self) -> list[Output]:
        before = self._rank.num_passes
        outputs = self._engine.step().outputs if self._engine.has_work() else []
        if self._others is not None and self._rank.num_passes == before:
            self._rank.pass_layers()
        return outputs

    def close(self) -> None:
        self._rank.runner.close()
        if self._group is not self._lane:
            self._group.transport.close()


def _limits(config: TrainConfig, model: LlamaConfig, most_sequences: int) -> Limits:
    groups, most_tokens = LayerGroups.of(model), config.data.sequence_tokens
    return Limits(
        max_model_len=most_tokens,
        max_num_seqs=most_sequences,
        max_num_batched_tokens=max(2048 if config.rollout.weights == "partition" else 512, most_sequences),
        num_blocks=groups.num * most_sequences * -(-most_tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        groups=groups,
    )


def engine_bytes(config: TrainConfig, topology: Topology) -> dict[str, int]:
    """Bytes that a rank's engine holds for the whole run beside the trainer's, by kind. Its steps come when the trainer's are over."""
    model, options, tp = config_of(config.model), engine_options(config), config.rollout.tp
    ranks = options.sharding.shard_group(topology.num_nodes, topology.ranks_per_node)
    _, plan = plan_model(config, model, torch.device("meta"), ranks.world_size)
    formats = WeightFormats()
    if config.model.shape is None:
        formats = choose_formats(open_checkpoint(config.model.start).reader(), model, "auto")
    shard, dtype = split_model(model, formats, tp).shards[0], options.compute_dtype
    limits = _limits(config, model, config.batch.sequences // topology.world_size * config.answers.samples * tp)
    blocks, room = (
        limits.num_blocks * limits.groups.num_layers,
        AdapterRoom(NUM_VERSIONS, config.model.lora.rank if config.model.lora else 0),
    )
    return {
        "engine_weights": _engine_weights(config, plan, model, formats, shard, ranks),
        "engine_cache": blocks * layer_block_bytes(model, shard, BLOCK_SIZE, dtype),
        "engine_adapters": adapter_bytes(model, shard, room, dtype.itemsize),
    }


def _engine_weights(
    config: TrainConfig, plan: BucketPlan, model: LlamaConfig, formats: WeightFormats, shard: Shard, ranks: GroupShape
) -> int:
    options, stacked = engine_options(config), StackedParts(model)
    dtype = options.compute_dtype
    gathered, room = dict[str, int](), 0  # of buckets in parts; of a layer's encoded bytes
    whole: dict[str, PackedFormat | None] = {}  # of matrices that the trainer has as the engine reads them
    for bucket in plan.buckets:
        for own in bucket.flat_params:
            form = form_of(options, bucket, own, ranks)
            if own.trainable or bucket.name == NORMS:
                continue
            if form.ranks.world_size > 1:
                size = own.blocks.num_elems if own.blocks else own.num_elems * dtype.itemsize
                gathered[bucket.name] = gathered.get(bucket.name, 0) + size
                if bucket.block is not None and (form.two_legs or not form.codec.exact):
                    room = max(room, form.ranks.world_size * form.wire_bytes)
            elif own.blocks or form.codec.exact:
                whole |= dict(zip([p.name for p in own.params], own.formats or [None] * len(own.params), strict=True))
    tensors = list(all_tensors(model, shard))
    if config.rollout.weights == "partition" and gathered:
        ends = sum(gathered.pop(name, 0) for name in ENDS)
        vectors = sum(formats.num_bytes(fused, dtype.itemsize) for fused in tensors if fused.columns is None)
        return NUM_BUFFERS * max(gathered.values()) + ends + vectors + room
    if config.rollout.tp > 1:
        whole = {}

    def is_shared(fused: Fused) -> bool:
        names = {name: stacked.find(name)[0] for name in fused.names}
        return all(held in whole and whole[held] == formats.packed.get(name) for name, held in names.items())

    return sum(formats.num_bytes(fused, dtype.itemsize) for fused in tensors if not is_shared(fused))


def _through_memory(group: Group) -> Group:
    """``group`` with messages through shared memory, if its ranks are processes of one host on CPUs; else itself. Collective.

    Rank 0 makes the memory, which the others find among its open files.
    """
    library, control, fd = group.transport, Control(group), -1
    if not isinstance(library, GlooTransport):
        return group
    if group.rank == 0 and why_unusable() is None:
        fd = make_segment(group.world_size)
    places = control.gather((host_identity(), f"/proc/{os.getpid()}/fd/{fd}"))
    host, path = places[0]
    if group.rank and host == host_identity():
        with contextlib.suppress(OSError):  # there is none, or a sandbox hides it
            fd = os.open(path, os.O_RDWR)
    if any(each < 0 for each in control.gather(fd)):
        if group.rank == 0 and {place for place, _ in places} == {host}:
            why = why_unusable() or "a rank cannot open rank 0's memory in /proc"
            _log.warning("ranks that answer together send their sums over sockets, which is slower: %s", why)
        return group
    return replace(group, transport=SharedMemoryTransport(fd, library))


class _Matrices:
    """An adapter's matrices in memory, read as those of a PEFT folder."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read_into(self, out: Tensor, name: str, *, rows: range, columns: range | None = None) -> None:
        kept = slice(None) if columns is None else slice(columns.start, columns.stop)
        out.copy_(self._tensors[name.removeprefix("base_model.model.")][rows.start : rows.stop, kept])


def record(
    config: TrainConfig,
    data: RunData,
    start: StartingModel,
    control: Control,
    device: torch.device,
) -> RunData:
    """Record what is missing of the answers to the prompts of ``data``. Returns them as the data of the run. Collective.

    Raises ValueError on all ranks: the target cannot be opened, does not fit, or the folder has other answers, or damaged ones; OSError:
    it cannot be written.
    """
    with control.failing_together(ValueError):
        target = open_target(config, start)
        recording = plan_recording(config, data, target)
        if control.rank == 0:
            recording.check()
    missing = control.gather(recording.missing())[0]
    if missing:
        engine = RolloutEngine(
            target, config, open_process_group(Topology(0, 1), store=HashStore(), device=device), _AT_ONCE
        )
        begun = perf_counter()
        try:
            for number in missing:
                recording.record(number, engine.answer, control)
                if control.rank == 0:
                    told = f"{recording.num_after(number)} of {recording.num_prompts} prompts"
                    sys.stderr.write(f"{target.name} has answered {told}, {perf_counter() - begun:.0f} s\n")
        finally:
            engine.close()
    documents = Documents(files=tuple(recording.files()), kind="distill")
    recorded = RunData(config=config, documents=documents, held_out_documents=None)
    with control.failing_together(ValueError):
        recording.check_recorded(start.config.vocab_size)
        recorded.check_documents()
    return recorded


def open_target(config: TrainConfig, start: StartingModel) -> StartingModel:
    """The model that answers. Raises ValueError: it has another vocabulary than the model to train, or no chat template."""
    assert config.distill is not None
    name = config.distill.target
    try:
        target = open_starting_model(ModelConfig(start=name), seed=config.seed, keep_in=config.run_folder, texts=list)
    except ModelError as error:
        raise ValueError(f"distill.target: {error}") from None
    tokens, others = (each.tokenizer.backend.get_vocab().items() for each in (start, target))
    if unlike := min(((token_id, token) for token, token_id in tokens ^ others), default=None):
        raise ValueError(
            f"distill.target: the vocabulary of {target.name} is not that of the model to train, from token {unlike[0]} on "
            f"({unlike[1]!r} in one of them); give model.tokenizer={name} with model.shape, or a model.start of the same family"
        )
    if target.tokenizer.chat_template is None:
        raise ValueError(f"distill.target: {target.name} has no chat template; give an instruct model")
    return target


def plan_recording(config: TrainConfig, data: RunData, target: StartingModel) -> Recording:
    """What there is to record. Raises DataError: a prompt does not fit, or the chat template has no place for questions."""
    assert config.distill is not None
    own, size, tokenizer = config.distill, config.data.sequence_tokens, target.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=False)
    pack = PromptPacker(ChatEncoder(tokenizer.render_chat, encode, tokenizer.eos_token_ids), size, own.answer_tokens)

    def to_prompt(question: str) -> Prompt | None:
        messages = [{"role": "user", "content": question}]
        tokens = tokenizer.encode_chat(messages)
        return (tokens, messages) if len(tokens) + own.answer_tokens <= size else None

    try:
        begun = tokenizer.render_chat([{"role": "user", "content": _ASKED}], False).partition(_ASKED)[0]
    except ChatTemplateError as error:
        raise DataError(f"distill.target: {error}") from None
    first, settings = encode(begun), own.model_dump(mode="json", exclude={"answers"})
    return Recording(
        folder=config.answers_folder,
        settings={**settings, "seed": config.seed, "prompts": fingerprint_of(data.documents.files), "tokens": size},
        prompts=[(prompt.token_ids, prompt.messages) for prompt in pack(data.documents)],
        num_questions=own.questions,
        first_question=first,
        question_tokens=min(_QUESTION_TOKENS, size - own.answer_tokens - len(first)),
        to_prompt=to_prompt,
        decode=tokenizer.decode,
        answer_tokens=own.answer_tokens,
        temperature=own.temperature,
        top=own.top,
        seed=config.seed,
    )
