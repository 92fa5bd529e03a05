"""The ``model.lora`` section of a configuration."""

import math
from typing import Annotated

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt


class LoraConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """LoRA: trains low-rank matrices beside frozen linear layers; {} has these defaults."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = Field(default=32.0, description="the matrices' product counts alpha / rank times")
    rslora: bool = Field(default=False, description="alpha / sqrt(rank) instead")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of an adapter's inputs left out"
    )
    targets: list[str] = Field(default=[], description="linear layers, such as q_proj; default: all in the blocks")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
