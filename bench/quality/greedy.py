"""Greedy texts: after how many tokens a quantized prompt leads to another text than the exact one.

Prompts are prefilled as the arm says, generated tokens go as ``serve`` sums them: exactly, unless a policy file says
otherwise. End tokens are not obeyed, so every text has the same length.
"""

import torch
from torch import Tensor

from tightwire.bench.quality.ranks import PlayedRanks

NUM_PROMPTS = 16
PROMPT_TOKENS = 128
NEW_TOKENS = 64


@torch.inference_mode()
def generate(ranks: PlayedRanks, prompts_BL: Tensor, arm: int, num_tokens: int) -> Tensor:
    """(B, num_tokens) most likely tokens."""
    hidden_BD = ranks.prefill(prompts_BL, arm)[:, -1]
    tokens: list[Tensor] = []
    for position in range(prompts_BL.shape[1], prompts_BL.shape[1] + num_tokens):
        tokens.append(ranks.logits(hidden_BD).argmax(1))
        if len(tokens) < num_tokens:
            hidden_BD = ranks.decode(tokens[-1], position, arm)
    return torch.stack(tokens, dim=1)


def first_differences(exact_BT: Tensor, other_BT: Tensor) -> list[int]:
    """For each text, how many tokens are the same before the first that is not; T when all are."""
    num_tokens = exact_BT.shape[1]
    return [int(row.argmax()) if row.any() else num_tokens for row in (exact_BT != other_BT).int()]
