"""The configuration of a training run as a tree of checked values, as in its YAML file. Unknown keys are errors."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tightwire.comm.codec.codec_names import parse_format
from tightwire.comm.group.topology import Topology
from tightwire.sizes import parse_bytes
from tightwire.training.config.learning import DistillConfig, GrpoConfig, LoraConfig, PpoConfig, RolloutConfig
from tightwire.training.config.optimizer import CompressorOptions, DenseOptions, OptimizerConfig, SparseOptions
from tightwire.training.config.section import Codec, Count, Link, Section, Share, ShareOrAll, checks
from tightwire.training.config.sharding import SHARDINGS

BYTES = "bytes"  # the byte tokenizer, which needs no file
BPE = "bpe:"
Prefetch = Literal["explicit", "forward", "backward", "implicit"]
PACKED = "packed"  # frozen weights in the blocks of their file
# The names of files that come with Tightwire.
ENGLISH, CHATS, PREFERENCES = "english-prose", "example-chats", "example-preferences"
PROMPTS = "example-prompts"


class ShapeConfig(Section):
    """Sizes of a new model, by the names of a config.json."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = Field(default=None, description="null: as many as attention heads")
    head_dim: PositiveInt | None = Field(default=None, description="null: hidden_size / num_attention_heads")
    intermediate_size: PositiveInt
    vocab_size: PositiveInt | None = Field(default=None, description="null: the tokenizer's")
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False


class ModelConfig(Section):
    """The model to train, its tokenizer and its computing dtype."""

    start: str = Field(
        default="",
        description="a folder, repo id (OWNER/NAME, OWNER/NAME:Q4_K_M), .gguf, known name, random:SHAPE; or use `shape`",
    )
    shape: ShapeConfig | None = None
    tokenizer: str = Field(default="", description="of a new model: bytes (default), bpe:SIZE (trained), or a model")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="in forward and backward; the optimizer has float32"
    )
    layers: list[Count] = Field(default=[], description="layers to keep of start, such as [0, 1, 29]; default: all")
    frozen: list[str] = Field(default=[], description="names not trained, such as model.embed_tokens.*")
    head: Literal["tokens", "reward"] = Field(
        default="tokens", description="reward: one number instead of a token's scores, learned from preferences"
    )
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_start(self) -> "ModelConfig":
        if bool(self.start) == (self.shape is not None):
            raise ValueError("give either start (an existing model) or shape (the sizes of a new one)")
        if self.start and self.tokenizer:
            raise ValueError(f"{self.start} has its own tokenizer; remove tokenizer")
        if self.tokenizer.startswith(BPE) and not self.tokenizer.removeprefix(BPE).isdecimal():
            raise ValueError(f"tokenizer {self.tokenizer!r} has no size; write {BPE}4096")
        if self.lora is not None and (self.frozen or self.layers or self.shape is not None):
            raise ValueError("lora freezes all weights of an existing model (start); remove frozen, layers or shape")
        if self.layers and self.shape is not None:
            raise ValueError("layers are those of an existing model (start); a new one has shape.num_hidden_layers")
        return self


class DataConfig(Section):
    """The text and its division into sequences."""

    files: list[str] = Field(
        min_length=1,
        description="patterns of text or .jsonl files, also .gz; english-prose, example-chats, example-preferences, example-prompts",
    )
    kind: Literal["text", "chat", "preferences", "prompts", "distill"] = Field(
        default="text",
        description="chat: JSONL of messages, whose answers are learned; preferences: of answer pairs (DPO); prompts (GRPO, PPO); "
        "distill: prompts that distill.target answers",
    )
    text_key: str = Field(default="text", description="the key of a JSONL line that holds the text")
    parted_by: Literal["blank-line", "file"] = Field(default="blank-line", description="what ends a document of a text")
    held_out: Share = Field(default=0.01, description="share of the documents used only for evaluation; prompts: 0")
    held_out_files: list[str] = Field(default=[], description="evaluate on these files instead")
    sequence_tokens: PositiveInt = Field(default=512, description="tokens per sequence")
    shuffle_documents: Count = Field(default=4096, description="window to draw documents from; 0: in order")


class BatchConfig(Section):
    """Sequences of an optimizer step, independent of the number of ranks."""

    sequences: PositiveInt = Field(default=32, description="sequences per step, over all ranks")
    micro_sequences: PositiveInt = Field(default=8, description="sequences that a rank computes at a time")

    def accumulation(self, world_size: int) -> int:
        """Micro-batches a step on each of ``world_size`` ranks. Raises ValueError: the sequences do not divide evenly."""
        at_once = self.micro_sequences * world_size
        if self.sequences % at_once:
            near = max(at_once, round(self.sequences / at_once) * at_once)
            raise ValueError(
                f"batch.sequences={self.sequences} cannot be divided over {world_size} ranks with batch.micro_sequences="
                f"{self.micro_sequences}: it must be a multiple of {at_once}; give batch.sequences={near}, other "
                "batch.micro_sequences, or another number of ranks"
            )
        return self.sequences // at_once


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    steps: PositiveInt = Field(default=1000, description="optimizer steps of the whole run")
    kind: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="the decay after the warm-up")
    warmup_steps: Count = Field(default=0, description="steps in which the rate rises to its peak")
    final_share: ShareOrAll = Field(default=0.1, description="share of the peak at the end")


class ParallelConfig(Section):
    """How the model is sharded over ranks, and how weights and gradients are sent."""

    sharding: Literal["none", "zero1", "zero2", "zero3", "hybrid"] = "none"
    nodes: PositiveInt | None = Field(default=None, description="number of nodes; default: the launcher's")
    prefetch: Prefetch = Field(
        default="explicit", description="request blocks ahead: in both passes, in one of them, or in none (implicit)"
    )
    num_buffers: Annotated[int, Field(ge=1)] = Field(default=2, description="weight buffers that blocks share")
    blocks_per_bucket: PositiveInt = Field(default=1, description="blocks that are gathered and summed together")
    reshard_ends: bool = Field(default=False, description="embedding and untied head share buffers, as blocks do")
    gather_codec: Codec = Field(default="none", description="codec of gathered weights, such as int8 (qwZ)")
    frozen_codec: Annotated[str, checks(lambda name: name == PACKED or parse_format(name))] | None = Field(
        default=None,
        description="how frozen weights are kept and gathered: a codec, or packed (a GGUF's own blocks); default: gather_codec",
    )
    gather_path: Literal["hierarchical", "flat"] = Field(
        default="hierarchical", description="over nodes: across them first and then inside, or all at once"
    )
    secondary: bool = Field(
        default=False, description="hpZ: each node keeps a copy of the weights for a step, of frozen ones for the run"
    )
    reduce_path: Literal["flat", "hierarchical"] = Field(
        default="flat", description="over nodes: sum all at once in rank order, or inside nodes first (qgZ)"
    )
    reduce_codec: Codec = Field(default="none", description="codec of gradients (qgZ), inside nodes if hierarchical")
    reduce_across_codec: Codec = Field(default="none", description="codec between nodes on the hierarchical path (qgZ)")
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_blocks: Count | Literal["all", "auto"] = Field(
        default=0, description="the first blocks recompute their activations in backward; auto: as few as memory asks"
    )
    between: Annotated[CompressorOptions, Field(discriminator="kind")] = Field(
        default=DenseOptions(), description="how replicas sum gradients (sharding none, hybrid)"
    )
    timeout_s: PositiveFloat = Field(default=300.0, le=1e9, description="longest wait for another rank")

    @model_validator(mode="after")
    def _options_agree(self) -> "ParallelConfig":
        sharding = SHARDINGS[self.sharding]
        if self.secondary and (sharding.keep_weights or sharding.shard_over != "world"):
            raise ValueError(
                f"a node's copy of the weights (secondary) needs sharding zero3, got {self.sharding}, which does not "
                "gather weights across nodes in forward and backward"
            )
        if self.reshard_ends and sharding.keep_weights:
            raise ValueError(f"reshard_ends needs sharding zero3 or hybrid; {self.sharding} keeps all weights")
        unused = () if sharding.shard_over == "world" else ("gather_path", "reduce_path")
        unused += ("gather_codec", "reduce_codec", "prefetch", "num_buffers") if sharding.shard_over == "self" else ()
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                use = "remove it; parallel.between says how nodes or replicas sum"
                raise ValueError(f"{name}={value} has no effect with sharding {self.sharding}: {use}")
        if self.reduce_path == "flat" and self.reduce_across_codec != "none":
            raise ValueError(f"reduce_across_codec {self.reduce_across_codec} needs reduce_path hierarchical, got flat")
        if isinstance(self.between, SparseOptions) and self.between.clip == "global" and self.between.clip_norm is None:
            raise ValueError("between.clip=global says how between.clip_norm clips, which is not given; give it too")
        return self

    def check_ranks(self, topology: Topology) -> None:
        """Raises ValueError: an option needs several nodes or replicas, and these ranks have none."""
        sharding, num_nodes = SHARDINGS[self.sharding], topology.num_nodes
        if self.secondary and num_nodes == 1:
            raise ValueError("parallel.secondary, a node's copy of the weights, needs at least two nodes, got one")
        if self.reduce_across_codec != "none" and num_nodes == 1:
            raise ValueError(
                f"parallel.reduce_across_codec={self.reduce_across_codec} needs at least two nodes; use reduce_codec on one node"
            )
        if self.sharding == "hybrid" and num_nodes == 1 and topology.world_size > 1:
            raise ValueError("parallel.sharding=hybrid needs several nodes, got one; use zero3, or set parallel.nodes")
        if self.between.kind != "dense" and (sharding.shard_over == "world" or topology.world_size == 1):
            raise ValueError(
                f"parallel.between.kind={self.between.kind} needs replicas, and parallel.sharding={self.sharding} on "
                f"{topology.world_size} ranks has none; use hybrid or none, on several ranks"
            )


class DpoConfig(Section):
    """DPO, the loss of data.kind preferences. The reference is the model without its adapter."""

    beta: PositiveFloat = Field(default=0.1, description="how strongly the model is held to the reference")


class EvaluationConfig(Section):
    """The loss on held-out text, and sample texts."""

    every: Count = Field(default=100, description="steps between evaluations; 0: never")
    sequences: PositiveInt = Field(default=64, description="largest number of sequences, over all ranks")
    prompts: list[str] = Field(default=[], description="prompts to continue at each evaluation")
    sample_tokens: PositiveInt = Field(default=48, description="tokens to add to each prompt")


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept."""

    every: Count = Field(default=200, description="steps between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(default=2, description="number of newest checkpoints to keep")
    resume: bool = Field(default=True, description="resume from the newest; false: there must be none")


class LogConfig(Section):
    """Output of the run in its folder and on the terminal."""

    every: PositiveInt = Field(default=10, description="steps between two lines on the terminal")
    tensorboard: bool = Field(default=True, description="write TensorBoard files, if tensorboard is installed")
    peak_tflops: PositiveFloat | None = Field(default=None, description="of a rank's device, for MFU; else measured")
    trace: bool = Field(default=False, description="write when each bucket moved, to the run's folder")


class ExportConfig(Section):
    """The Hugging Face folder at the end."""

    folder: str = Field(default="", description="default: `model` in the run's folder")
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


class DryRunConfig(Section):
    """Assumptions of a dry run; a run ignores them."""

    ranks: PositiveInt | None = Field(default=None, description="number of ranks; default: the launcher's")
    memory: Annotated[str, checks(parse_bytes)] = Field(
        default="", description="for checkpoint_blocks auto; default: 0.9 of what is free"
    )
    inside: Link = Field(default="", description="link between ranks of a node, such as 200gbit")
    between: Link = Field(default="", description="link of a node to the others, such as 1gbit,latency=50us")


class TrainConfig(Section):
    """The whole run."""

    run: str = Field(min_length=1, description="the run's folder: checkpoints, log, page, exported model")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    dpo: DpoConfig = DpoConfig()
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    distill: DistillConfig | None = None
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig(between=DenseOptions())
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    export: ExportConfig = ExportConfig()
    dry_run: DryRunConfig = DryRunConfig()

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, values: Any) -> Any:
        """Set defaults that depend: no prompts are held out, and with DGC, which clips local gradients itself, nothing is clipped."""
        match values:
            case {"data": {"kind": "prompts", **data}}:
                values = {**values, "data": {"kind": "prompts", "held_out": 0.0, **data}}
        match values:
            case {"parallel": {"between": {"kind": "dgc"}}, "optimizer": {**optimizer}}:
                values = {**values, "optimizer": {"clip_norm": None, **optimizer}}
        return values

    @model_validator(mode="after")
    def _sections_agree(self) -> "TrainConfig":
        self.parallel.between.check_optimizer(self.optimizer)
        data, schedule = self.data, self.schedule
        if data.held_out_files and data.held_out not in (0, DataConfig.model_fields["held_out"].default):
            raise ValueError("data: give held_out (a share) or held_out_files, not both")
        if schedule.warmup_steps > schedule.steps:
            raise ValueError(f"schedule: warmup_steps={schedule.warmup_steps} are more than steps={schedule.steps}")
        if data.kind == "preferences" and self.model.lora is None:
            raise ValueError("data.kind=preferences trains an adapter, not the whole model; set model.lora={}")
        if self.model.head == "reward" and data.kind != "preferences":
            raise ValueError(f"model.head=reward learns from data.kind=preferences, got {data.kind}")
        is_dpo, is_prompts = data.kind == "preferences" and self.model.head == "tokens", data.kind == "prompts"
        if self.parallel.frozen_codec not in (None, "none") and self.model.lora is None and not self.model.frozen:
            raise ValueError("parallel.frozen_codec is for frozen weights, and this run has none; remove it")
        for name, is_used, use in (
            ("dpo", is_dpo, "data.kind=preferences with model.head=tokens"),
            ("grpo", is_prompts and self.ppo is None, "data.kind=prompts without ppo"),
            ("ppo", is_prompts, "data.kind=prompts"),
            ("rollout", is_prompts, "data.kind=prompts"),
            *((f"data.{key}", data.kind == "text", "data.kind=text") for key in ("text_key", "parted_by")),
            ("evaluation.prompts", not is_prompts and self.model.head == "tokens", "text, chat, distill and DPO"),
            ("schedule.final_share", schedule.kind != "constant", "schedule.kind=linear and cosine"),
        ):  # a run's own file has all keys, so one with its default is as good as none
            section, _, key = name.rpartition(".")
            holder = getattr(self, section, self)
            default = type(holder).model_fields[key].default
            if not is_used and getattr(holder, key) != default:
                undo = f"remove it, or override it with {name}={default}" if section else "remove it"
                raise ValueError(f"this run does not use {name}, which is for {use}; {undo}")
        if is_prompts:
            self._check_answers()
        if (data.kind == "distill") != (self.distill is not None):
            raise ValueError("data.kind=distill and a section distill, with its target, need each other")
        if self.distill is not None and (self.model.lora is not None or data.held_out_files):
            raise ValueError("data.kind=distill: a whole model learns; remove model.lora and data.held_out_files")
        name, asked = ("distill", self.distill) if self.distill else (self.answers.section, self.answers)
        if (is_prompts or self.distill) and asked.answer_tokens >= data.sequence_tokens:
            room = f"data.sequence_tokens={data.sequence_tokens}"
            raise ValueError(f"{name}.answer_tokens={asked.answer_tokens} leaves no room for a prompt in {room}")
        return self

    def _check_answers(self) -> None:
        lora, answers = self.model.lora, self.answers
        if lora is None or lora.dropout:
            raise ValueError(
                "data.kind=prompts: an adapter without dropout is trained, because the answers are sampled without; set model.lora={}"
            )
        if not answers.rewards:
            raise ValueError(f"data.kind=prompts: give {answers.section}.rewards, such as [package.module:function]")

    @property
    def answers(self) -> GrpoConfig | PpoConfig:
        """How a run of data.kind prompts learns."""
        return self.ppo or self.grpo

    @property
    def head(self) -> Literal["tokens", "reward", "critic"]:
        """What the model ends with; ``critic``: the head for tokens, and the critic's beside it."""
        return self.model.head if self.ppo is None else "critic"

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches of an optimizer step on each rank. Raises ValueError: the sequences do not divide evenly."""
        of_all = self.batch.accumulation(world_size)
        if of_all % self.answers.minibatches:
            raise ValueError(
                f"ppo.minibatches={self.answers.minibatches} do not divide the {of_all} micro-batches that batch.sequences="
                f"{self.batch.sequences} are on each of {world_size} ranks; give another batch.sequences or batch.micro_sequences"
            )
        return of_all // self.answers.minibatches

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step over all ranks, with padding. Preferences have two rows a sequence, prompts one an answer."""
        rows = {"preferences": 2, "prompts": self.answers.samples}.get(self.data.kind, 1)
        return self.batch.sequences // self.answers.minibatches * self.data.sequence_tokens * rows

    @property
    def product_passes(self) -> int:
        """Times that a step multiplies by each matrix: forward, gradients of inputs, of weights, the reference; a critic's too."""
        return 4 if self.ppo else 2 + (self.model.lora is None) + self.has_reference

    @property
    def has_reference(self) -> bool:
        """True if a step computes the model without its adapter too."""
        is_dpo = self.data.kind == "preferences" and self.model.head == "tokens"
        return is_dpo or (self.data.kind == "prompts" and self.ppo is None and self.grpo.beta > 0)

    @property
    def run_folder(self) -> Path:
        return Path(os.path.expanduser(self.run))

    @property
    def answers_folder(self) -> Path:
        """The folder of the answers that a run of data.kind distill learns from."""
        return Path(os.path.expanduser((self.distill.answers if self.distill else "") or self.run_folder / "answers"))

    def check_ranks(self, topology: Topology) -> None:
        """Raises ValueError: the configuration does not fit these ranks."""
        self.micro_batches(topology.world_size)
        self.parallel.check_ranks(topology)
        self.rollout.check_ranks(topology)
