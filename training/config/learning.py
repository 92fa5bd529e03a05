"""The sections ``model.lora``, ``grpo``, ``ppo``, ``rollout`` and ``distill`` of a configuration: what learns, and from which answers."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tightwire.comm.all_reduce.names import split_name
from tightwire.comm.group.topology import Topology
from tightwire.training.config.section import Section, ShareOrAll


class LoraConfig(Section):
    """LoRA: trains low-rank matrices beside frozen linear layers; {} has these defaults."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = Field(default=32.0, description="the matrices' product counts alpha / rank times")
    rslora: bool = Field(default=False, description="alpha / sqrt(rank) instead")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="share of its inputs left out")
    targets: list[str] = Field(default=[], description="linear layers, such as q_proj; default: all in the blocks")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class AnswersConfig(Section):
    """What GRPO and PPO share: how answers are sampled, rewarded and weighed. ``minibatches``: steps that divide the answers."""

    section: ClassVar[str]

    rewards: list[str] = Field(
        default=[], description="functions, package.module:name, or folders of reward models; their numbers are added"
    )
    shuffled: bool = Field(
        default=False, description="a control: answers learn from each other's rewards, so rewards should not rise"
    )
    answer_tokens: PositiveInt = Field(default=64, description="longest answer; with the prompt, data.sequence_tokens")
    temperature: PositiveFloat = Field(
        default=1.0, description="divides the logits, in the answers and in all probabilities of the loss"
    )
    clip: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.2, description="ratios beyond 1 +- clip learn nothing")
    most_weight: PositiveFloat = Field(default=2.0, description="largest importance weight of a sampled token")


class GrpoConfig(AnswersConfig):
    """GRPO, the loss of data.kind prompts: groups of answers that the model samples, and what rewards say of them."""

    section: ClassVar[str] = "grpo"
    minibatches: ClassVar[int] = 1

    samples: Annotated[int, Field(ge=2)] = Field(default=8, description="answers to a prompt: its group")
    advantage: Literal["group", "leave-one-out"] = Field(
        default="group", description="group: (reward - mean) / deviation of the group; leave-one-out: RLOO's"
    )
    beta: Annotated[float, Field(ge=0)] = Field(default=0.04, description="weight of the KL to the reference; 0: none")
    updates: PositiveInt = Field(default=1, description="optimizer steps with the same answers")


class PpoConfig(AnswersConfig):
    """PPO instead of GRPO: a critic, an adapter of its own over the same base, says what to expect at each token; {} has these defaults."""

    section: ClassVar[str] = "ppo"

    samples: PositiveInt = Field(default=1, description="answers to a prompt")
    beta: Annotated[float, Field(ge=0)] = Field(
        default=0.05, description="what a token's log-probability above the reference's costs of the reward"
    )
    gamma: ShareOrAll = Field(default=1.0, description="what a reward counts one token earlier")
    lam: ShareOrAll = Field(default=0.95, description="GAE's lambda; 1: rewards alone, 0: the critic's next value")
    clip_value: PositiveFloat = Field(default=0.2, description="values farther from the first ones learn nothing")
    value_weight: PositiveFloat = Field(default=0.1, description="of the critic's loss")
    epochs: PositiveInt = Field(default=2, description="times that all answers are learned from")
    minibatches: PositiveInt = Field(default=1, description="optimizer steps of an epoch; each takes as many prompts")

    @property
    def updates(self) -> int:
        """Optimizer steps with the same answers."""
        return self.epochs * self.minibatches


class RolloutConfig(Section):
    """The engine that answers prompts. The names are those of a server's options."""

    tp: PositiveInt = Field(
        default=1, description="ranks that split its weights and answer together: 1, those of a node, or all"
    )
    weights: Literal["resident", "partition"] = Field(
        default="resident", description="partition: each step gathers the trainer's parts of layers; none is held twice"
    )
    allreduce: str = Field(default="auto", description="what sums their partial results; auto is lossless")
    allreduce_decode: str | None = Field(
        default=None, description="the same for generated tokens; default: allreduce if it is lossless, else auto"
    )

    @model_validator(mode="after")
    def _sums_exist(self) -> "RolloutConfig":
        for name in (self.allreduce, self.allreduce_decode or "auto"):
            split_name(name)
        if self.tp == 1 and (self.allreduce, self.allreduce_decode) != ("auto", None):
            raise ValueError("allreduce is for several ranks that answer together; give tp, their number")
        if self.tp > 1 and self.weights == "partition":
            raise ValueError("weights=partition: a rank answers with whole layers, which tp splits; give one of them")
        return self

    def check_ranks(self, topology: Topology) -> None:
        """Raises ValueError: so many ranks cannot answer together."""
        if self.tp not in (possible := sorted({1, topology.ranks_per_node, topology.world_size})):
            raise ValueError(f"rollout.tp={self.tp}: these ranks can answer in groups of {possible}")


class DistillConfig(Section):
    """Distillation, the loss of data.kind distill: the KL to a target's most likely tokens, in answers that it gave once."""

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
