"""The optimizer's options. Names torch's optimizers as text, so that reading a configuration does not import torch."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveFloat, model_validator

# An optimizer here sees shards of flat parameters, each with elements of many matrices.
_REFUSED = {
    "Muon": "it needs whole matrices",
    "Adafactor": "it needs rows and columns of whole matrices",
    "LBFGS": "it computes the loss several times per step",
    "SparseAdam": "it needs sparse gradients",
}
_WITHOUT_DECAY = ("Rprop",)
_NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
_TORCH_NAMES = {name.lower(): name for name in (*_NAMES, *_REFUSED)}


class OptimizerConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Any optimizer of torch that works element by element."""

    name: str = Field(default="adamw", description="a class of torch.optim")
    lr: PositiveFloat = Field(default=3e-4, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="for matrices; norms and biases have none"
    )
    clip_norm: PositiveFloat | None = Field(
        default=1.0, description="largest global norm of the gradient; null: no clipping, the default with dgc"
    )
    options: dict[str, Any] = Field(
        default={}, description="further arguments of the class, such as betas: [0.9, 0.95]"
    )

    @property
    def torch_name(self) -> str:
        return _TORCH_NAMES[self.name.lower()]

    @model_validator(mode="before")
    @classmethod
    def _decay_where_there_is_one(cls, values: Any) -> Any:
        if isinstance(values, dict) and _TORCH_NAMES.get(str(values.get("name")).lower()) in _WITHOUT_DECAY:
            return {"weight_decay": 0.0, **values}
        return values

    @model_validator(mode="after")
    def _known(self) -> "OptimizerConfig":
        name = _TORCH_NAMES.get(self.name.lower())
        possible = ", ".join(sorted(_NAMES))
        if name is None:
            raise ValueError(f"there is no optimizer {self.name!r}; choose one of {possible}")
        if name in _REFUSED:
            raise ValueError(f"{name} does not work on shards: {_REFUSED[name]}; choose one of {possible}")
        if name in _WITHOUT_DECAY and self.weight_decay:
            raise ValueError(f"{name} has no weight decay; remove weight_decay, or choose another optimizer")
        for option in ("lr", "weight_decay", "params"):
            if option in self.options:
                raise ValueError(f"{option} does not belong here; set optimizer.{option}")
        for option, value in self.options.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"options.{option} must be finite, got {value}")
        return self
