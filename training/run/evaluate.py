"""Computes the mean loss on held-out sequences over all ranks, and writes greedy continuations of prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.training.data.sequences import TokenSequence
from tightwire.training.engine.engine import Engine
from tightwire.training.ranks.control import Control

_IGNORED = -100


class Evaluator:
    """``sequences`` is the same list on all ranks; each rank evaluates every W-th of them."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        control: Control,
        sequences: Sequence[TokenSequence],
        *,
        micro_sequences: int,
        device: torch.device,
    ) -> None:
        self._model, self._engine, self._control, self._device = model, engine, control, device
        own = list(sequences[control.rank :: control.world_size])
        num_batches = -(-len(sequences) // (control.world_size * micro_sequences))
        # Each pass gathers weights, so all ranks run the same number; fill up with blocks whose targets are ignored.
        nothing = TokenSequence(
            index=-1, inputs_S=sequences[0].inputs_S, targets_S=torch.full_like(sequences[0].targets_S, _IGNORED)
        )
        own += [nothing] * (num_batches * micro_sequences - len(own))
        self._batches = [own[at : at + micro_sequences] for at in range(0, len(own), micro_sequences)]

    def run(self) -> tuple[float, int]:
        """(mean loss in nats per token, number of tokens), the same on all ranks. Collective."""
        total, count = 0.0, 0
        self._model.eval()
        with self._engine.evaluation():
            for batch in self._batches:
                inputs_BS = torch.stack([sequence.inputs_S for sequence in batch]).to(self._device)
                targets_BS = torch.stack([sequence.targets_S for sequence in batch]).to(self._device)
                total += float(self._sum(inputs_BS, targets_BS))
                count += int((targets_BS != _IGNORED).sum())
        self._model.train()
        ranks = self._control.gather_numbers(total, count)
        tokens = int(sum(count for _, count in ranks))
        return sum(total for total, _ in ranks) / tokens, tokens

    def _sum(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        logits_BSV = self._model(input_ids=inputs_BS, use_cache=False).logits.float()
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=_IGNORED, reduction="sum")


def write_samples(
    model: Any,
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    max_positions: int,
    device: torch.device,
) -> tuple[tuple[str, str], ...]:
    """(prompt, continuation) for each prompt, cut at the end token. Collective: all ranks get the same texts."""
    written = []
    model.eval()
    with engine.evaluation():
        for prompt in prompts:
            ids = tokenizer.encode(prompt) or [tokenizer.bos_token_id or 0]
            begin = len(ids)
            # Do not stop early: each pass gathers weights, so all ranks must run the same number.
            for _ in range(num_tokens):
                inputs_1S = torch.tensor([ids[-max_positions:]], device=device)
                logits_V = model(input_ids=inputs_1S, use_cache=False, logits_to_keep=1).logits[0, -1]
                ids.append(int(logits_V.argmax()))
            written.append((prompt, tokenizer.decode(_until_end(ids[begin:], tokenizer.eos_token_ids))))
    model.train()
    return tuple(written)


def _until_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    ends = [at for at, token in enumerate(ids) if token in end_ids]
    return ids[: ends[0]] if ends else ids
