"""Writes greedy continuations of prompts with the model in training.

There is no KV cache: each token takes a whole forward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.training.engine.engine import Engine


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
