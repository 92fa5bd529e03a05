"""A reward model that `tightwire train` exported, as a function of prompts and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import nn

from tightwire.model.adapters.peft import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import read_json
from tightwire.model.open import open_checkpoint
from tightwire.training.config.learning import LoraConfig
from tightwire.training.data.chats import ChatEncoder, Messages, make_row, up_to_answer
from tightwire.training.data.documents import DataError
from tightwire.training.data.sequences import stack
from tightwire.training.start.export import SCORE_NAME
from tightwire.training.start.model import HEAD_NAME, StartingModel, build_model
from tightwire.training.start.objective import rewards_of


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A base model with its adapter and head, in float32; a copy of its own on each rank."""

    model: Any
    encode: ChatEncoder
    most_tokens: int
    device: torch.device

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The model of an exported folder. Raises ModelError: it is none, or it or its base model cannot be read."""
        settings = read_json(folder / CONFIG_FILE)
        if settings.get("modules_to_save") != ["score"]:
            raise ModelError(f"{folder} is no reward model; train one with model.head=reward")
        stored = load_file(folder / WEIGHTS_FILE)
        lora = LoraConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            rslora=settings["use_rslora"],
            targets=settings["target_modules"],
        )
        checkpoint = open_checkpoint(settings["base_model_name_or_path"])
        tokenizer, llama = checkpoint.tokenizer(), checkpoint.config
        start = StartingModel(name=checkpoint.name, config=llama, reader=checkpoint.reader(), tokenizer=tokenizer)
        model: Any = build_model(llama, device=device, lora=lora, head="reward").eval()
        for name, parameter in [*model.named_parameters()]:
            own = stored.get(f"{PREFIX}{SCORE_NAME if name == HEAD_NAME else name}")
            values = (start.read(name) if own is None else own).to(device, torch.float32)
            if values.shape != parameter.shape:
                raise ModelError(f"{name}: r and the base model require {parameter.shape}, got {values.shape}")
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, nn.Parameter(values, requires_grad=False))
        plain = partial(tokenizer.encode, add_special_tokens=False)
        encode = ChatEncoder(tokenizer.render_chat, plain, tokenizer.eos_token_ids)
        return cls(model, encode, llama.max_positions, device)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Messages], completions: Sequence[str], **_: Any) -> list[float]:
        """The reward of each answer. Raises DataError: the chat template or the model's context does not fit one."""
        return [self._score(*pair) for pair in zip(prompts, completions, strict=True)]

    def _score(self, prompt: Messages, answer: str) -> float:
        chat, place = [*prompt, {"role": "assistant", "content": answer}], "an answer to be rewarded"
        tokens, learned = up_to_answer(*self.encode(chat, place, first=len(prompt)))
        if len(tokens) > self.most_tokens + 1:
            raise DataError(
                f"an answer of {len(tokens) - 1} tokens with its prompt; the reward model has {self.most_tokens} positions"
            )
        row = stack([make_row(tokens, learned, self.most_tokens, place)])
        return float(rewards_of(self.model, row.to(self.device)))
