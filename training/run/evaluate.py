"""Computes the mean loss on held-out blocks over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tightwire.training.data.blocks import Block
from tightwire.training.engine.engine import Engine
from tightwire.training.ranks.control import Control

_IGNORED = -100


class Evaluator:
    """``blocks`` is the same list on all ranks; each rank evaluates its own part of it."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        control: Control,
        blocks: Sequence[Block],
        *,
        micro_sequences: int,
        device: torch.device,
    ) -> None:
        self._model, self._engine, self._control, self._device = model, engine, control, device
        own = list(blocks[control.rank :: control.world_size])
        num_batches = -(-len(blocks) // (control.world_size * micro_sequences))
        # Each pass gathers weights, so all ranks run the same number; fill up with blocks whose targets are ignored.
        nothing = Block(index=-1, inputs_S=blocks[0].inputs_S, targets_S=torch.full_like(blocks[0].targets_S, _IGNORED))
        own += [nothing] * (num_batches * micro_sequences - len(own))
        self._batches = [own[at : at + micro_sequences] for at in range(0, len(own), micro_sequences)]

    def run(self) -> tuple[float, int]:
        """(mean loss in nats per token, number of tokens), the same on all ranks. Collective."""
        total, count = 0.0, 0
        self._model.eval()
        with self._engine.evaluation():
            for batch in self._batches:
                inputs_BS = torch.stack([block.inputs_S for block in batch]).to(self._device)
                targets_BS = torch.stack([block.targets_S for block in batch]).to(self._device)
                total += float(self._sum(inputs_BS, targets_BS))
                count += int((targets_BS != _IGNORED).sum())
        self._model.train()
        ranks = self._control.gather_numbers(total, count)
        tokens = int(sum(count for _, count in ranks))
        return sum(total for total, _ in ranks) / tokens, tokens

    def _sum(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self._model(input_ids=inputs_BS, use_cache=False).logits.float()
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=_IGNORED, reduction="sum")
