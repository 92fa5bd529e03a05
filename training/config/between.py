"""Options for the sum of gradients between replicas, one class per method; ``kind`` selects the class.

``training.between.make`` builds the slot from these options.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from tightwire.training.config.optimizer import OptimizerConfig

Sparsity = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Accept any optimizer; subclasses restrict it.

        Raises:
            ValueError: the slot does not work with ``optimizer``, or both would do the same work.
        """


class DenseOptions(_Options):
    """All numbers, exactly."""

    kind: Literal["dense"] = "dense"


class QuantizedOptions(_Options):
    """All numbers, encoded: the second hop of qgZ as a sum that every replica gets."""

    kind: Literal["quantized"] = "quantized"
    reduce_codec: str = Field(default="int4", description="of node sums on their way to who adds them")
    gather_codec: str = Field(default="int8", description="of the result on its way back")


class SparseOptions(_Options):
    """What both ways of sending few numbers are told. The article's warm-up of ``sparsity`` is 0.75, 0.9375, 0.984375, 0.996."""

    sparsity: tuple[Sparsity, ...] = Field(
        default=(0.999,), min_length=1, description="share that stays at home, one after the other"
    )
    rampup_begin_step: Count = Field(default=0, description="steps before it are dense")
    rampup_step: PositiveInt = Field(default=1, description="steps over which the sparsities are gone through")
    dense_below: Count = Field(default=16384, description="parameters with fewer elements travel whole")
    value_type: Literal["float32", "float16"] = "float32"
    clip_norm: PositiveFloat | None = Field(
        default=None, description="of a parameter's mean gradient; each replica clips its own, by N^-1/2 of its share"
    )

    def sparsity_at(self, step: int) -> float | None:
        """The sparsity at ``step``, counted from 0; None: dense.

        Each sparsity applies for an equal span of the ``rampup_step`` steps; the last one applies from then on.
        """
        if step < self.rampup_begin_step:
            return None
        span = (step - self.rampup_begin_step) * len(self.sparsity) // self.rampup_step
        return self.sparsity[min(span, len(self.sparsity) - 1)]


class TopKOptions(SparseOptions):
    """The few largest numbers; what is left is added to the next gradient. Goes with any optimizer."""

    kind: Literal["top-k"] = "top-k"


class DgcOptions(SparseOptions):
    """Deep gradient compression: as top-k, of momentum SGD's velocities. Takes the place of the optimizer's momentum."""

    kind: Literal["dgc"] = "dgc"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    mask_momentum: bool = Field(default=True, description="forget the momentum of what was sent")

    @model_validator(mode="after")
    def _nesterov_of_a_momentum(self) -> "DgcOptions":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        name = optimizer.torch_name
        if name != "SGD":
            raise ValueError(
                f"parallel.between.kind=dgc replaces the gradient and the momentum of SGD, and optimizer.name is "
                f"{optimizer.name}: take optimizer.name=sgd, or parallel.between.kind=top-k, which goes with {name}"
            )
        for option in ("momentum", "nesterov"):
            if optimizer.options.get(option):
                raise ValueError(
                    f"parallel.between.kind=dgc keeps the momentum itself: set parallel.between.{option}, and leave "
                    f"optimizer.options.{option} out"
                )
        for option in ("dampening", "maximize"):
            if optimizer.options.get(option):
                raise ValueError(
                    f"parallel.between.kind=dgc is SGD with a momentum of its own, which has no {option}: leave "
                    f"optimizer.options.{option} out"
                )
        if optimizer.weight_decay:
            raise ValueError(
                "parallel.between.kind=dgc decays weights in the local gradient: set parallel.between.weight_decay, and "
                "optimizer.weight_decay=0"
            )
        if optimizer.clip_norm is not None:
            raise ValueError(
                "parallel.between.kind=dgc clips local gradients, and what it sums of them is none to clip again: set "
                "parallel.between.clip_norm, and leave optimizer.clip_norm out"
            )


BetweenOptions = DenseOptions | QuantizedOptions | DgcOptions | TopKOptions
