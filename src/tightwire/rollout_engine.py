"""The server's engine inside a rank of the trainer: it answers the prompts of GRPO with the newest adapter, or those of a distillation.

Each rank has its own: the base model's weights as the checkpoint has them, a paged cache, and room for two versions of an adapter, if any.
An answer ends under the version that it began with.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Spent
from tightwire.model.adapters.peft import AdapterFile
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.checkpoint.errors import ChatTemplateError, ModelError
from tightwire.model.checkpoint.tensors import StackedParts
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler as TokenSampler
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.recorded_answers import Prompt, Recording
from tightwire.server.config.limits import BLOCK_SIZE, Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.lora import AdapterTable
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.engine_stats import RankCounts
from tightwire.server.ipc.messages import AddRequest
from tightwire.training.config.tree import ModelConfig, TrainConfig
from tightwire.training.data.chats import ChatEncoder
from tightwire.training.data.documents import DataError, Documents, RunData, describe_files
from tightwire.training.data.prompts import PromptPacker
from tightwire.training.ranks.control import Control
from tightwire.training.start.grpo import Answer
from tightwire.training.start.model import StartingModel, open_starting_model

_NUM_VERSIONS = 2
_AT_ONCE = 64  # answers that a rank samples at a time
_QUESTION_TOKENS = 64  # longest question that a target asks itself
_ASKED = "tightwire-asks"  # stands for a question in a rendered chat


class RolloutEngine:
    """A ``training.run.rollouts.Sampler``."""

    def __init__(
        self, start: StartingModel, dtype: torch.dtype, device: torch.device, most_tokens: int, most_sequences: int
    ) -> None:
        """``most_tokens``: of a prompt and its answer. ``most_sequences``: at once."""
        config, groups = start.config, LayerGroups.of(start.config)
        self._config, self._lora, self._version = config, start.lora, 0
        limits = Limits(
            max_model_len=most_tokens,
            max_num_seqs=most_sequences,
            max_num_batched_tokens=max(512, most_sequences),
            num_blocks=groups.num * most_sequences * -(-most_tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            groups=groups,
        )
        self._rank = _OneRank(start, dtype, device, limits)
        self._engine = Engine(
            runner=self._rank,
            sampler=TokenSampler(config.vocab_size),
            limits=limits,
            rules=RequestRules(
                vocab_size=config.vocab_size,
                max_model_len=most_tokens,
                eos_token_ids=frozenset(start.tokenizer.eos_token_ids),
            ),
            adapters=AdapterTable(_NUM_VERSIONS if start.lora else 0),
        )

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
        self, prompts: Sequence[tuple[list[int], int]], most_tokens: int, temperature: float = 1.0, top: int = 0
    ) -> list[Answer]:
        tops: list[list[list[tuple[int, float]]]] = [[] for _ in prompts]
        answers = [Answer([], [], False, own) for own in tops]
        for number, (tokens, seed) in enumerate(prompts):
            params = SamplingParams(max_tokens=most_tokens, temperature=temperature, seed=seed, logprobs=top)
            self._engine.add(AddRequest(id=str(number), prompt_token_ids=tokens, params=params, adapter=self._version))
        while self._engine.has_work():
            for output in self._engine.step().outputs:
                if output.finish_reason in ("error", "refused"):
                    raise RuntimeError(f"the engine did not answer a prompt: {output.message}")
                place = int(output.id)
                answers[place].token_ids.extend(output.token_ids)
                answers[place].logprobs.extend(score.logprob for score in output.logprobs or ())
                tops[place].extend(score.top for score in output.logprobs or ())
                if output.finish_reason == "stop":
                    answers[place] = answers[place]._replace(ended=True)
        return answers

    def close(self) -> None:
        self._rank.runner.close()
        self._rank.group.close()


class _OneRank:
    """The ranks of the engine (a ``StepRunner``): this one."""

    def __init__(self, start: StartingModel, dtype: torch.dtype, device: torch.device, limits: Limits) -> None:
        formats = choose_formats(start.reader, start.config, "auto")
        self.group = open_process_group(Topology(0, 1), store=HashStore(), device=device)
        self.runner = build_runner(
            start.config,
            start.reader,
            split_model(start.config, formats, 1, None),
            RankGroups(self.group),
            RunnerOptions(
                dtype=dtype,
                max_model_len=limits.max_model_len,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                groups=limits.groups,
                formats=formats,
                graphs_up_to=limits.max_num_seqs,
                adapters=AdapterRoom(_NUM_VERSIONS, start.lora.rank) if start.lora else None,
            ),
        )
        self.execute = self.runner.execute

    def broadcast(self, plans: Sequence[Any]) -> None:
        """There is no other rank."""

    def choose(self, plans: Sequence[Any], logits_RV: Any, banned: Sequence[bytes]) -> Any:
        return self.runner.choose(plans[0], logits_RV, banned[0])

    def step_tokens(self) -> None:
        return None

    def comm_spent(self) -> Spent:
        return Spent()

    def counts(self) -> RankCounts:
        return RankCounts()


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
    stop_signal: Callable[[], int],
) -> RunData | int:
    """Record what is missing of the answers to the prompts of ``data``. Returns them as the data of the run. Collective.

    Returns the signal that some rank received meanwhile, if any; what is recorded stays. Raises ValueError on all ranks: the target
    cannot be opened, does not fit, or the folder has other answers; OSError: it cannot be written.
    """
    with control.failing_together(ValueError):
        target = open_target(config, start)
        recording = plan_recording(config, data, target)
        if control.rank == 0:
            recording.check()
    missing = control.gather(recording.missing())[0]
    if missing:
        engine = RolloutEngine(
            target, getattr(torch, config.model.compute_dtype), device, config.data.sequence_tokens, _AT_ONCE
        )
        begun = perf_counter()
        try:
            for number in missing:
                recording.record(number, engine.answer, control)
                if control.rank == 0:
                    told = f"{recording.num_after(number)} of {recording.num_prompts} prompts"
                    sys.stderr.write(f"{target.name} has answered {told}, {perf_counter() - begun:.0f} s\n")
                if signal := max(control.gather_numbers(stop_signal()))[0]:
                    return int(signal)
        finally:
            engine.close()
    documents = Documents(files=tuple(recording.files()), kind="distill")
    recorded = RunData(config=config, documents=documents, held_out_documents=None)
    with control.failing_together(DataError):
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
        settings={**settings, "seed": config.seed, "prompts": describe_files(data.documents.files), "tokens": size},
        prompts=[(prompt.token_ids, prompt.messages) for prompt in pack(data.documents)],
        num_questions=own.questions,
        first_question=first,
        question_tokens=min(_QUESTION_TOKENS, size - own.answer_tokens - len(first)),
        to_prompt=to_prompt,
        decode=tokenizer.decode,
        vocab_size=tokenizer.vocab_size,
        answer_tokens=own.answer_tokens,
        temperature=own.temperature,
        top=own.top,
        seed=config.seed,
    )
