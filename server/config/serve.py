"""The options of ``serve``: one frozen tree from which ``flags`` derives flags and YAML keys."""

from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from tightwire.model.weights import QUANTIZATIONS
from tightwire.option import option, require, require_declared, require_seconds
from tightwire.server.config.hosts import HostOptions
from tightwire.server.config.http import HttpOptions
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.weights import WeightOptions
from tightwire.sizes import parse_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model, its number format and its device."""

    model: str = option(
        "smollm2-135m",
        "a known name, a Hugging Face folder or repo id (OWNER/NAME:Q4_K_M for a GGUF), a .gguf file, or random:SHAPE",
        metavar="MODEL",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "one or several names that clients may use; answers have the first. Default: the model's own. Write MODEL before it",
        metavar="NAME",
        repeated=True,
        nargs="+",
    )
    device: str = option("auto", "where ranks run; auto takes CUDA when there is one", ("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "number format of activations, weights that are not packed, and (see --kv-cache-dtype) the KV cache; auto: the checkpoint's (on a CPU: "
        "bfloat16)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "format of weight matrices in memory. auto: blocks of a GGUF or of a quantized folder as packed as in the file, floats in "
        "--dtype; none: all in --dtype; int8, int4: float matrices are quantized when they are read (with int4, the embedding and "
        "the head get 8 bits)",
        QUANTIZATIONS,
    )
    activations: str = option(
        "auto",
        "inputs of products with packed weights, on a CPU. int8: rounded to 8 bits in groups of 32, as llama.cpp does, which is "
        "faster; float: in --dtype; auto: float",
        ("auto", "float", "int8"),
    )
    seed: int = option(0, "seed of random weights, and of requests without a seed (0: a new seed for each request)")

    def __post_init__(self) -> None:
        require(self.model != "", "model", self.model, "a name, a path or random:SHAPE")
        names = self.served_model_name
        require("" not in names and len({*names}) == len(names), "served_model_name", names, "different names")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Scheduling and the KV cache."""

    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens; default: the model's context, or less if memory is short",
        least=2,
    )
    max_num_seqs: int = option(64, "sequences in one step, of each replica", least=1)
    max_num_batched_tokens: int = option(
        512, "tokens in one step of each replica (4096 on a GPU); longer prompts take several", least=1
    )
    prefix_cache: str = option(
        "prompts",
        "what requests with a common prefix share of the KV cache. prompts: the prompt, whose keys and values do not depend "
        "on other requests (on a CPU); all: generated tokens too, so that the next turn of a chat starts sooner (in 16-bit "
        "numbers a text may then differ by rounding); none: nothing",
        ("none", "prompts", "all"),
    )
    kv_cache_memory: int | None = option(
        None,
        "bytes of KV cache over all ranks, such as 2GiB; default: enough for --max-num-seqs, but at most a share of memory",
        metavar="BYTES",
        parse=parse_memory,
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of keys and values. int8: half the memory of bfloat16, with a scale for each head and token; auto: --dtype",
        ("auto", "float32", "bfloat16", "int8"),
    )
    kv_offload: bool = option(
        False,
        "keep the KV cache in host memory, for a cache that is too large for the device. A layer's keys and values are copied "
        "to one of two buffers on the device while the previous layer is computed. Turns CUDA graphs off",
    )
    cuda_graphs: bool = option(
        True,
        "on CUDA, capture the steps of generated tokens as graphs and replay them, instead of launching each kernel",
    )
    plan_ahead: str = option(
        "auto",
        "plan and launch each step while the previous one runs, so that the device does not wait for the host: on, off, or "
        "auto (on for CUDA without --dp). Answers do not change; a new prompt may wait one step longer",
        ("auto", "on", "off"),
    )
    speculation: str = option(
        "none",
        "draft tokens and check several in one step, as many as pay. suffix drafts what most often followed the last tokens "
        "earlier in the text, ngram what followed the last 2 to 4 the latest time, suffix-shared as suffix in the text and in the "
        "server's last answers to requests without cache_salt, draft what --draft-model finds most likely. The answer does not change "
        "(on a CPU, to the bit)",
        ("none", "ngram", "suffix", "suffix-shared", "draft"),
    )
    draft_model: str | None = option(
        None,
        "a small model of the same vocabulary, named as --model, which rank 0 holds for --speculation draft",
        metavar="MODEL",
    )

    def kv_dtype(self, dtype: str) -> str:
        """The number format of the KV cache, for activations in ``dtype``."""
        return dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def __post_init__(self) -> None:
        require_declared(self)
        tokens, want = self.max_num_batched_tokens, f"at least --max-num-seqs ({self.max_num_seqs})"
        want += ", or running sequences could not all take a step"
        require(tokens >= self.max_num_seqs, "max_num_batched_tokens", tokens, want)
        drafts = self.speculation == "draft"
        want = "a small model's name with --speculation draft, and left out without it"
        require(bool(self.draft_model) == drafts, "draft_model", self.draft_model, want)
        want = "other than draft with --kv-offload: a draft model has its keys and values on rank 0's device"
        require(not (drafts and self.kv_offload), "speculation", self.speculation, want)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutOptions:
    """How long ranks may be silent or stuck."""

    comm_timeout_s: float = option(
        60.0,
        "longest wait for another rank in one collective, or for data of a streamed layer or an offloaded KV cache",
        metavar="S",
    )
    rank_timeout_s: float = option(10.0, "a rank without a heartbeat for this long counts as dead", metavar="S")
    step_timeout_s: float = option(
        120.0,
        "a step that starts no collective and receives no data of a streamed layer for this long counts as hung",
        metavar="S",
    )

    def __post_init__(self) -> None:
        for own in fields(self):
            require_seconds(own.name, getattr(self, own.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    weights: WeightOptions = field(default_factory=WeightOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    timeouts: TimeoutOptions = field(default_factory=TimeoutOptions)
    hosts: HostOptions = field(default_factory=HostOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)

    def __post_init__(self) -> None:
        if self.parallel.link is not None and self.model.device == "cuda":
            raise ValueError("--link emulates a wire between CPU ranks; give --device cpu, or leave --link out")
        if self.parallel.dp > 1 and self.engine.plan_ahead == "on":
            why = "because the replicas' steps are planned together; use --plan-ahead auto or off"
            raise ValueError(f"--plan-ahead on is not possible with --dp {self.parallel.dp}, {why}")
        dp, nodes = self.parallel.dp, self.parallel.nodes
        if self.weights.weights == "partition" and dp in (1, nodes):
            given = f"--dp {dp} --nodes {nodes} has one on each; give --dp {2 * nodes} or more, or --weights stream"
            raise ValueError(f"--weights partition shares layers among the replicas of a node, and {given}")


GROUPS: dict[str, type[Any]] = get_type_hints(ServeConfig)


def option_fields() -> dict[str, tuple[str, Any]]:
    """Every option by name: its group and its dataclass field. Names are unique over the groups."""
    return {f.name: (group, f) for group, cls in GROUPS.items() for f in fields(cls)}
