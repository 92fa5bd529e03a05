"""The server's engine inside a rank of the trainer: it answers the prompts of GRPO with the newest adapter.

Each rank has its own: the base model's weights as the checkpoint has them, a paged cache, and room for two versions of the adapter.
An answer ends under the version that it began with.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
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
from tightwire.model.checkpoint.tensors import StackedParts
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler as TokenSampler
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.server.config.limits import BLOCK_SIZE, Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.lora import AdapterTable
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.engine_stats import RankCounts
from tightwire.server.ipc.messages import AddRequest
from tightwire.training.start.grpo import Answer
from tightwire.training.start.model import StartingModel

_NUM_VERSIONS = 2


class RolloutEngine:
    """A ``training.run.rollouts.Sampler``."""

    def __init__(
        self, start: StartingModel, dtype: torch.dtype, device: torch.device, most_tokens: int, most_sequences: int
    ) -> None:
        """``most_tokens``: of a prompt and its answer. ``most_sequences``: at once."""
        assert start.lora is not None, "GRPO trains an adapter"
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
        self._rank = _OneRank(start, dtype, device, limits, start.lora.rank)
        self._engine = Engine(
            runner=self._rank,
            sampler=TokenSampler(config.vocab_size),
            limits=limits,
            rules=RequestRules(
                vocab_size=config.vocab_size,
                max_model_len=most_tokens,
                eos_token_ids=frozenset(start.tokenizer.eos_token_ids),
            ),
            adapters=AdapterTable(_NUM_VERSIONS),
        )

    @torch.inference_mode()
    def load(self, matrices: Mapping[str, Tensor]) -> None:
        modules = {name.removesuffix(".lora_A.weight") for name in matrices if name.endswith(".lora_A.weight")}
        table, products = self._engine.adapters, self._rank.runner.adapters
        assert products is not None
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
    def answer(self, prompts: Sequence[tuple[list[int], int]], most_tokens: int) -> list[Answer]:
        answers = [Answer([], [], False) for _ in prompts]
        for number, (tokens, seed) in enumerate(prompts):
            params = SamplingParams(max_tokens=most_tokens, temperature=1.0, seed=seed, logprobs=0)
            self._engine.add(AddRequest(id=str(number), prompt_token_ids=tokens, params=params, adapter=self._version))
        while self._engine.has_work():
            for output in self._engine.step().outputs:
                if output.finish_reason in ("error", "refused"):
                    raise RuntimeError(f"the engine did not answer a prompt: {output.message}")
                place = int(output.id)
                answers[place].token_ids.extend(output.token_ids)
                answers[place].logprobs.extend(score.logprob for score in output.logprobs or ())
                if output.finish_reason == "stop":
                    answers[place] = answers[place]._replace(ended=True)
        return answers

    def close(self) -> None:
        self._rank.runner.close()
        self._rank.group.close()


class _OneRank:
    """The ranks of the engine (a ``StepRunner``): this one."""

    def __init__(
        self, start: StartingModel, dtype: torch.dtype, device: torch.device, limits: Limits, lora_rank: int
    ) -> None:
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
                adapters=AdapterRoom(_NUM_VERSIONS, lora_rank),
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
