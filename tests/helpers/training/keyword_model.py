"""A model of plain torch whose blocks are called by keyword, with tensors in containers."""

from typing import Any

import torch
from helpers.training.training_ranks import VOCABULARY
from torch import Tensor, nn

WIDTH = 16


class KeywordBlock(nn.Module):
    """All that needs a gradient comes by keyword, inside a dictionary; one output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, *, state: dict[str, Any], scale: float) -> dict[str, Any]:
        hidden = self.norm(state["hidden"])
        side = torch.tanh(self.left(hidden)) * scale
        return {"hidden": state["hidden"] + self.right(side) * state["pair"][0], "pair": (side, hidden), "none": None}


class KeywordModel(nn.Module):
    """Seeded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(KeywordBlock() for _ in range(4))})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model["layers"]  # pyright: ignore[reportReturnType]

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        # Of three uses the gradients would be added in another order than without gates.
        state = {"hidden": hidden, "pair": (torch.ones_like(hidden), hidden)}
        for layer in self.layers:
            state = layer(state=state, scale=0.5)
        return nn.functional.cross_entropy(self.head(state["hidden"]).flatten(0, 1), tokens.flatten())


def keyword_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)
