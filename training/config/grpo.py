"""The ``grpo`` section of a configuration."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class GrpoConfig(BaseModel):
    """GRPO, the loss of data.kind prompts: groups of answers that the model samples, and what rewards say of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rewards: list[str] = Field(
        default=[], description="functions, package.module:name, or folders of reward models; their numbers are added"
    )
    samples: Annotated[int, Field(ge=2)] = Field(default=8, description="answers to a prompt: its group")
    answer_tokens: PositiveInt = Field(default=64, description="longest answer; with the prompt, data.sequence_tokens")
    temperature: PositiveFloat = Field(
        default=1.0, description="divides the logits, in the answers and in all probabilities of the loss"
    )
    advantage: Literal["group", "leave-one-out"] = Field(
        default="group", description="group: (reward - mean) / deviation of the group; leave-one-out: RLOO's"
    )
    beta: Annotated[float, Field(ge=0)] = Field(default=0.04, description="weight of the KL to the reference; 0: none")
    clip: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.2, description="ratios beyond 1 +- clip learn nothing")
    most_weight: PositiveFloat = Field(default=2.0, description="largest importance weight of a sampled token")
    updates: PositiveInt = Field(default=1, description="optimizer steps with the same answers")
