"""Options of the optimizer, and of the sum of gradients between replicas, with one class per method, which ``kind`` selects.

Names torch's optimizers as text, so that reading a configuration does not import torch.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tightwire.training.config.section import Codec, Count, Section, Share

# An optimizer here sees shards of flat parameters, each with elements of many matrices.
_REFUSED = {
    "Muon": "it needs whole matrices",
    "Adafactor": "it needs rows and columns of whole matrices",
    "LBFGS": "it computes the loss several times per step",
    "SparseAdam": "it needs sparse gradients",
}
_NAMES = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
_TORCH_NAMES = {name.lower(): name for name in (*_NAMES, *_REFUSED)}


class OptimizerConfig(Section):
    """Any optimizer of torch that works element by element."""

    name: str = Field(default="adamw", description="a class of torch.optim")
    lr: PositiveFloat = Field(default=3e-4, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.1, description="of matrices; not of norms, biases")
    clip_norm: PositiveFloat | None = Field(
        default=1.0, description="largest global norm of the gradient; null: no clipping, the default with dgc"
    )
    options: dict[str, Any] = Field(default={}, description="more arguments of the class, such as betas: [0.9, 0.95]")

    @property
    def torch_name(self) -> str:
        return _TORCH_NAMES[self.name.lower()]

    @model_validator(mode="before")
    @classmethod
    def _decay_where_there_is_one(cls, values: Any) -> Any:
        if isinstance(values, dict) and str(values.get("name")).lower() == "rprop":
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
        if name == "Rprop" and self.weight_decay:
            raise ValueError(f"{name} has no weight decay; remove weight_decay, or choose another optimizer")
        for option in ("lr", "weight_decay", "params"):
            if option in self.options:
                raise ValueError(f"{option} does not belong here; set optimizer.{option}")
        for option, value in self.options.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"options.{option} must be finite, got {value}")
        return self


class _Options(Section):
    @property
    def takes_all_sums(self) -> bool:
        """True if the compressor begins after backward, with all gradients."""
        return isinstance(self, SparseOptions) and self.clip_norm is not None and self.clip == "global"

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Raises ValueError: the compressor does not work with ``optimizer``, or both would do the same work."""


class DenseOptions(_Options):
    """Every element, exactly."""

    kind: Literal["dense"] = "dense"


class QuantizedOptions(_Options):
    """Every element, encoded: qgZ's sum between nodes, returned to every replica."""

    kind: Literal["quantized"] = "quantized"
    reduce_codec: Codec = Field(default="int4", description="codec of node sums sent to the rank that adds them")
    gather_codec: Codec = Field(default="int8", description="codec of the sum sent back")


class SparseOptions(_Options):
    """Options of both sparse compressors. The article's warm-up of ``sparsity`` is 0.75, 0.9375, 0.984375, 0.996."""

    sparsity: tuple[Share, ...] = Field(
        default=(0.999,), min_length=1, description="shares of elements that are not sent, one after the other"
    )
    rampup_begin_step: Count = Field(default=0, description="steps before it are dense")
    rampup_step: PositiveInt = Field(default=1, description="steps over which the sparsities are divided")
    dense_below: Count = Field(default=16384, description="parameters with fewer elements are sent whole")
    value_type: Literal["float32", "float16"] = "float32"
    clip_norm: PositiveFloat | None = Field(
        default=None, description="largest norm of the mean gradient; each replica clips its own gradient"
    )
    clip: Literal["parameter", "global"] = Field(
        default="parameter",
        description="global: the norm is over all parameters, so sums between replicas wait for backward",
    )

    def sparsity_at(self, step: int) -> float | None:
        """The sparsity at ``step``, from 0; None: dense. Each lasts an equal share of the ``rampup_step`` steps."""
        if step < self.rampup_begin_step:
            return None
        span = (step - self.rampup_begin_step) * len(self.sparsity) // self.rampup_step
        return self.sparsity[min(span, len(self.sparsity) - 1)]

    def phases(self) -> dict[int, float | None]:
        """``sparsity_at`` of each step from which another sparsity holds, in order of the steps."""
        count = len(self.sparsity)
        firsts = [self.rampup_begin_step - (-number * self.rampup_step // count) for number in range(count)]
        dense = {0: None} if self.rampup_begin_step else {}
        return dense | dict(zip(firsts, self.sparsity, strict=True))


class TopKOptions(SparseOptions):
    """The largest elements; the rest is added to the next gradient. Works with any optimizer."""

    kind: Literal["top-k"] = "top-k"


class DgcOptions(SparseOptions):
    """Deep gradient compression: top-k of momentum SGD's velocities. Replaces the optimizer's momentum."""

    kind: Literal["dgc"] = "dgc"
    momentum: Share = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    mask_momentum: bool = Field(default=True, description="clear the momentum of elements that were sent")

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        name, given = optimizer.torch_name, optimizer.options
        if self.nesterov and not self.momentum:
            raise ValueError("parallel.between.nesterov needs a momentum above 0")
        if name != "SGD":
            raise ValueError(
                f"parallel.between.kind=dgc needs SGD, but optimizer.name is "
                f"{optimizer.name}: use optimizer.name=sgd, or parallel.between.kind=top-k, which works with {name}"
            )
        own = "parallel.between.kind=dgc has its own"
        for option in ("momentum", "nesterov"):
            if given.get(option):
                raise ValueError(f"{own} momentum: set parallel.between.{option} and remove optimizer.options.{option}")
        for option in ("dampening", "maximize"):
            if given.get(option):
                raise ValueError(f"parallel.between.kind=dgc has no {option}: remove optimizer.options.{option}")
        if optimizer.weight_decay:
            raise ValueError(
                f"{own} weight decay, of the local gradient: set parallel.between.weight_decay and optimizer.weight_decay=0"
            )
        if optimizer.clip_norm is not None:
            raise ValueError(
                f"{own} clipping, of local gradients: set parallel.between.clip_norm and remove optimizer.clip_norm"
            )


CompressorOptions = DenseOptions | QuantizedOptions | DgcOptions | TopKOptions
