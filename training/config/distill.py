"""The ``distill`` section of a configuration: learning what a larger model, the target, finds likely in its own answers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class DistillConfig(BaseModel):
    """Distillation, the loss of data.kind distill: the KL to a target's most likely tokens, in answers that it gave once."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    target: str = Field(min_length=1, description="the model that answers; the learning one has its vocabulary")
    questions: Annotated[int, Field(ge=0)] = Field(
        default=0, description="prompts that the target also asks itself, as its chat template has a user ask"
    )
    answer_tokens: PositiveInt = Field(default=256, description="longest answer; with the prompt, data.sequence_tokens")
    temperature: PositiveFloat = Field(default=1.0, description="of the answers; what is learned is at temperature 1")
    top: PositiveInt = Field(default=32, description="most likely tokens that are kept of each place")
    answers: str = Field(
        default="",
        description="folder of the answers, for other runs to use again; default: `answers` in the run's folder",
    )
