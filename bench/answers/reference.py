"""Computes the answers of the model itself: transformers in float32, on the weights of the checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tightwire.model.checkpoint.config import config_to_hf
from tightwire.model.checkpoint.reader import expected_tensors
from tightwire.model.open import Checkpoint
from tightwire.model.text.tokenizer import Tokenizer

_PROMPTS = Path(__file__).with_name("prompts.txt")


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's greedy continuation."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs_TV: Tensor  # float32, before each token

    def margin(self, position: int) -> float:
        """How far the largest logit is above the second."""
        first, second = self.log_probs_TV[position].topk(2).values.tolist()
        return first - second


def read_prompts(tokenizer: Tokenizer, num_prompts: int) -> dict[str, list[int]]:
    """The first prompts of each kind, chat messages and text, as token ids by text. Half are of each kind."""
    prompts: dict[str, list[int]] = {}
    for kind in ("chat", "text"):
        lines = [line for line in _PROMPTS.read_text().splitlines() if line.startswith(f"{kind} ")]
        for line in lines[: num_prompts // 2]:
            text = line.removeprefix(f"{kind} ")
            prompts[text] = (
                tokenizer.encode_chat([{"role": "user", "content": text}]) if kind == "chat" else tokenizer.encode(text)
            )
    return prompts


def float32_model(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint in transformers, its weights unpacked to float32.

    Cost: 4 bytes of memory for each weight.
    """
    config, reader = checkpoint.config, checkpoint.reader()
    model = LlamaForCausalLM(LlamaConfig.from_dict(config_to_hf(config))).float().eval()
    tensors = model.state_dict()
    for name, _ in expected_tensors(config):
        reader.read_into(tensors[name], name, rows=range(len(tensors[name])))
    return model


@torch.inference_mode()
def answer(model: LlamaForCausalLM, prompt: str, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
    """The model's greedy answer; no end token stops it."""
    token_ids: list[int] = []
    rows, past, inputs = [], None, torch.tensor([list(prompt_ids)])
    for _ in range(num_tokens):
        output = model(inputs, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = output.past_key_values
        rows.append(output.logits[0, -1].float().log_softmax(-1))
        token_ids.append(int(rows[-1].argmax()))
        inputs = torch.tensor([token_ids[-1:]])
    return Answer(prompt, list(prompt_ids), token_ids, torch.stack(rows))
