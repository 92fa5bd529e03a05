"""The one frozen tree of options of ``serve``; flags (``flags``) and YAML keys are derived from these fields.

Each field's metadata carries its help text. A value is checked where it is born; an unknown key is an error.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import EMULATIONS, USER_SPACE
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

_MAX_RANKS = 64  # each is a process that imports torch before the model can say how many it is good for
POLICY_PREFIX = "policy:"  # of a name that stands for a policy file
_SPECULATION = ("speculative_tokens", "speculative_max_seqs", "ngram_max", "ngram_min")  # mean nothing without one
_MAX_GUESSES = 64  # also of sequences and of last tokens looked for: beyond, checking costs more than it can bring
_MAX_SECONDS = 1e6  # eleven days: a deadline that no clock or timer overflows at


def _option(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag} must be {want}, got {value!r}")


def _require_seconds(name: str, value: float) -> None:
    _require(0 < value <= _MAX_SECONDS, name, value, f"above 0 and at most {_MAX_SECONDS:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, in which numbers, on which device."""

    model: str = _option(
        "smollm2-135m", "a known name, a Hugging Face folder or repo id, a .gguf file, or random:SHAPE"
    )
    served_model_name: str | None = _option(None, "the name clients use; default: the model's own", metavar="NAME")
    device: str = _option("auto", "where ranks run; auto takes CUDA when there is one", ("auto", "cpu", "cuda"))
    dtype: str = _option(
        "auto",
        "numbers of activations, the KV cache, and weights that are not packed; auto: the checkpoint's own (float16 and float32 files: bfloat16 on CPU)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = _option(
        "auto",
        "how weight matrices are kept in memory, whatever --dtype the activations have. auto: GGUF's Q8_0, Q4_0 and Q4_1 as "
        "the file holds them, all else as numbers of --dtype; none: everything as such numbers; int8, int4: floats are "
        "quantized when they are read (int4: but for the embedding and the head, which get 8 bits)",
        ("auto", "none", "int8", "int4"),
    )
    seed: int = _option(0, "seed of random: weights and of requests that bring none (0: a fresh one per request)")

    def __post_init__(self) -> None:
        _require(self.model != "", "model", self.model, "a name, a path or random:SHAPE")
        _require(self.served_model_name != "", "served_model_name", self.served_model_name, "left out, or not empty")
        _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelOptions:
    """How the model is split, and how partial sums are added."""

    tp: int = _option(1, "ranks the model is split over", metavar="N")
    tp_split: tuple[float, ...] | None = _option(
        None, "relative shares of work per rank, for unlike devices, such as 2,1", metavar="A,B"
    )
    allreduce: str = _option(
        "auto",
        "algorithm that sums the ranks' partial results: auto (the fastest lossless one by message size), native, ring, "
        "one-shot, two-shot, hierarchical, flash-int8, flash-int6, flash-int6-uniform, flash-int5, flash-int4, "
        "flash:RS,AG with a codec for each leg, or hierarchical:CODEC; `tightwire explain` says what each would do",
        metavar="NAME",
    )
    allreduce_decode: str | None = _option(
        None,
        "algorithm for rows of generated tokens; default: as --allreduce when that is lossless, auto when it is lossy",
        metavar="NAME",
    )
    allreduce_o_proj: str | None = _option(
        None, "algorithm for prompt rows after attention; default: as --allreduce", metavar="NAME"
    )
    allreduce_down_proj: str | None = _option(
        None, "algorithm for prompt rows after the MLP; default: as --allreduce", metavar="NAME"
    )
    comm_error_budget: float | None = _option(
        None,
        "relative RMS error of one AllReduce that auto may spend on prompt rows, such as 0.01; default: none, auto is "
        "lossless",
        metavar="E",
    )
    comm_policy: str | None = _option(
        None,
        "a policy file, such as `tightwire bench quality` writes: an AllReduce for each layer, site and phase; instead of "
        "the five options above",
        metavar="FILE",
    )
    allreduce_extra: tuple[str, ...] = _option(
        (),
        "further names as for --allreduce, or policy:FILE, that a single request may ask for: "
        '"tightwire": {"allreduce": "NAME"} in its body',
        metavar="NAME,NAME",
    )
    transport: str = _option(
        "auto",
        "how ranks reach each other; auto: shared memory between CPU processes, each other's memory between GPUs where "
        "they can, torch.distributed otherwise",
        ("auto", "shared-memory", "process-group", "peer-memory"),
    )
    nodes: int = _option(1, "equal nodes that the ranks are on, in order; for hierarchical", metavar="N")
    link: str | None = _option(
        None,
        "a slow wire between the ranks, emulated on this machine: 200mbit, 2.5gbit, 300MB/s, pcie3x4, latency=50us, or "
        "a rate and a latency with a comma between; each rank is a node of its own unless --nodes says otherwise",
        metavar="LINK",
    )
    link_emulation: str = _option(
        "auto",
        "how the wire of --link is made: network namespaces with the kernel's own rate limit (as root, with iproute2), or "
        "a transport slowed down in user space; auto: namespaces where they can be had",
        EMULATIONS,
    )
    bind_cores: bool = _option(
        True, "on CPU, several ranks each keep to cores of their own, where there are enough for all of their threads"
    )
    overlap: str = _option(
        "auto",
        "compute one half of a prompt's step while the other half's sums are on the wire: on, off, or auto, which does it "
        "beside --link, as what memory carries takes the cores' own time; between CPU ranks",
        ("auto", "on", "off"),
    )
    comm_timeout_s: float = _option(60.0, "longest a rank waits in one collective before it gives up", metavar="S")

    def __post_init__(self) -> None:
        _require(1 <= self.tp <= _MAX_RANKS, "tp", self.tp, f"1 to {_MAX_RANKS}")
        _require_seconds("comm_timeout_s", self.comm_timeout_s)
        _require(self.nodes >= 1 and self.tp % self.nodes == 0, "nodes", self.nodes, f"a divisor of --tp ({self.tp})")
        self._check_link()
        self._check_arms()
        budget = self.comm_error_budget
        _require(budget is None or 0 < budget < 1, "comm_error_budget", budget, "above 0 and below 1")
        if self.tp_split is not None:
            _require(len(self.tp_split) == self.tp, "tp_split", self.tp_split, f"{self.tp} numbers, one per rank")
            _require(
                all(0 < share < math.inf for share in self.tp_split), "tp_split", self.tp_split, "finite and above 0"
            )

    def _check_arms(self) -> None:
        if doubled := sorted({name for name in self.allreduce_extra if self.allreduce_extra.count(name) > 1}):
            raise ValueError(f"--allreduce-extra names {', '.join(doubled)} twice")
        extra = [name for name in self.allreduce_extra if name != self.allreduce]
        want = "left out with --tp 1, as one rank sums nothing; give --tp 2 or more"
        _require(self.tp > 1 or not extra, "allreduce_extra", ",".join(extra), want)
        by_file = [name for name in self.allreduce_extra if name.startswith(POLICY_PREFIX)]
        if self.comm_policy is None and not by_file:
            return
        file = by_file[0] if self.comm_policy is None else f"--comm-policy {self.comm_policy}"
        for name in ("allreduce_o_proj", "allreduce_down_proj", "allreduce_decode", "comm_error_budget"):
            self._refuse_beside(file, name, getattr(self, name), None)
        if self.comm_policy is not None:
            self._refuse_beside(file, "allreduce", self.allreduce, "auto")

    def _refuse_beside(self, file: str, name: str, value: object, absent: object) -> None:
        if value != absent:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value} and {file} both say how to sum; leave out one of them, or put what {flag} says into the "
                "file's rules"
            )

    @property
    def wire_nodes(self) -> int:
        """The nodes that the wire of ``link`` joins."""
        return self.nodes if self.nodes > 1 else self.tp

    def _check_link(self) -> None:
        if self.link is None:
            _require(self.link_emulation == "auto", "link_emulation", self.link_emulation, "beside a --link")
            return
        try:
            parse_link(self.link)
        except ValueError as error:
            raise ValueError(f"--link: {error}") from None
        _require(self.tp > 1, "link", self.link, "left out with --tp 1, as one rank sends nothing; give --tp 2 or more")
        fits = self.transport in ("auto", "process-group") or self.link_emulation == USER_SPACE
        want = f"auto or process-group beside --link {self.link}, as memory would pass the wire by; or give "
        _require(fits, "transport", self.transport, f"{want}--link-emulation {USER_SPACE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How much runs at once."""

    max_model_len: int | None = _option(
        None,
        "longest prompt plus answer, in tokens; default: the model's context, less if memory is short",
        metavar="N",
    )
    max_num_seqs: int = _option(64, "sequences in one step", metavar="N")
    max_num_batched_tokens: int = _option(
        512, "tokens in one step; longer prompts are prefilled in chunks", metavar="N"
    )
    block_size: int = _option(16, "tokens per KV cache block", metavar="N")
    prefix_cache: str = _option(
        "prompts",
        "what requests that begin alike share of the KV cache: prompts, whose numbers do not depend on what runs beside "
        "them (on a CPU); all, generated tokens too, so a chat goes on sooner (in 16-bit numbers a text may then differ by "
        "rounding); or none",
        ("none", "prompts", "all"),
    )
    kv_cache_memory: int | None = _option(
        None,
        "bytes of KV cache over all ranks, such as 2GiB; default: what max_num_seqs needs, at most a share of memory",
        metavar="BYTES",
    )

    cuda_graphs: bool = _option(
        True,
        "on CUDA, capture the steps of generated tokens and replay them; without, each kernel is launched by the host",
    )
    plan_ahead: str = _option(
        "auto",
        "plan and launch each step while the one before it still runs, so that a device need not wait for the host in "
        "between: on, off, or auto, which does it on CUDA, as on a CPU the cores that would plan are those that compute. "
        "The answers are the same; a prompt that arrives may wait for one step more",
        ("auto", "on", "off"),
    )
    speculation: str = _option(
        "none",
        "guess tokens ahead and check several in one step: ngram guesses what followed when the last tokens stood in the "
        "text before. The answer is the same (on a CPU to the bit), sooner where it repeats its prompt",
        ("none", "ngram"),
    )
    speculative_tokens: int = _option(5, "most tokens guessed at a time", metavar="N")
    speculative_max_seqs: int = _option(16, "with more sequences in a step nothing is guessed", metavar="N")
    ngram_max: int = _option(4, "most last tokens that must have stood before for a guess", metavar="N")
    ngram_min: int = _option(2, "fewest", metavar="N")

    def __post_init__(self) -> None:
        for option in fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            _require(not choices or value in choices, option.name, value, f"one of {', '.join(choices)}")
            if option.name in _SPECULATION and self.speculation == "none":
                _require(value == option.default, option.name, value, "left out, or given beside --speculation ngram")
        for name in ("speculative_tokens", "speculative_max_seqs", "ngram_min"):
            _require(1 <= getattr(self, name) <= _MAX_GUESSES, name, getattr(self, name), f"1 to {_MAX_GUESSES}")
        want = f"--ngram-min ({self.ngram_min}) to {_MAX_GUESSES}"
        _require(self.ngram_min <= self.ngram_max <= _MAX_GUESSES, "ngram_max", self.ngram_max, want)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(
            self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "at least 2"
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least --max-num-seqs ({self.max_num_seqs}), or running sequences could not all take a step",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOptions:
    """Where layers' weights are while they are not computed with."""

    weights: str = _option(
        "auto",
        "resident: on the device; stream: as many layers as fit stay there, the others come one after the other through two "
        "buffers, the next while one is computed; auto: resident where they fit, else stream",
        ("auto", "resident", "stream"),
    )
    stream_from: str = _option(
        "auto",
        "where streamed layers are kept: host memory, or the model's files (`tightwire prepare` makes files that are read "
        "faster); auto: host memory beside CUDA where it is large enough, else disk",
        ("auto", "host", "disk"),
    )
    weight_codec: str = _option(
        "none",
        "what plain matrices of streamed layers are encoded with on their way, and where they wait; a prepared folder "
        "brings its own",
        tuple(WEIGHT_CODECS),
    )
    stream_layers: int | None = _option(
        None, "layers to stream; default: as few as the memory allows, all of them if they all would fit", metavar="N"
    )
    stream_policy: str = _option(
        "latency",
        "latency: memory goes to resident layers first, so that little streams; throughput: to the KV cache first, and a "
        "step takes as many prompt tokens as cost no more time than the layers' way (micro-batches share a layer)",
        ("latency", "throughput"),
    )
    stream_rate: int | None = _option(
        None,
        "slow the source down to so many bytes a second and rank, such as 500MB, to see what that does",
        metavar="BYTES",
    )
    device_memory: int | None = _option(
        None, "most memory a rank may take, such as 4GiB; default: what is free", metavar="BYTES"
    )
    weight_io: str = _option(
        "auto",
        "how a prepared folder is read: buffered, through the page cache; direct, around it; auto: direct where the files are "
        "larger than half of the free memory",
        ("auto", "direct", "buffered"),
    )
    verify_weights: bool = _option(
        False, "hold each layer of a prepared folder against its checksum when it is first read"
    )
    fetch_timeout_s: float = _option(
        60.0, "longest that not one byte of a streamed layer may come, before the server gives up", metavar="S"
    )

    def __post_init__(self) -> None:
        _require_seconds("fetch_timeout_s", self.fetch_timeout_s)
        for option in ("stream_layers", "stream_rate", "device_memory"):
            value = getattr(self, option)
            _require(value is None or value >= 1, option, value, "at least 1")
        for option in ("stream_layers", "stream_rate"):
            if self.weights == "auto":
                _require(getattr(self, option) is None, option, getattr(self, option), "given beside --weights stream")
        if self.weights == "resident":
            for option in ("stream_from", "stream_layers", "stream_policy", "stream_rate", "weight_codec"):
                default = next(field.default for field in fields(self) if field.name == option)
                value = getattr(self, option)
                _require(value == default, option, value, "left out beside --weights resident, as nothing streams")


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The outside door."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on; 0 takes a free one", metavar="N")
    api_key: str | None = _option(None, "when set, every route but /health* and /metrics wants it as a Bearer token")
    max_queued_requests: int = _option(256, "requests waiting or running before new ones get 429", metavar="N")
    max_body_bytes: int = _option(4 << 20, "largest request body", metavar="BYTES")
    shutdown_grace_s: float = _option(30.0, "after SIGTERM, how long running requests may take to finish", metavar="S")
    rank_timeout_s: float = _option(10.0, "a rank silent for so long is taken for dead", metavar="S")
    step_timeout_s: float = _option(
        120.0,
        "a step that begins no new collective, and gets nothing of a streamed layer, for so long is taken for hung",
        metavar="S",
    )

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        # An unset variable in a script must not become a key that everybody can guess.
        _require(self.api_key != "", "api_key", self.api_key, "left out, or not empty")
        for name in ("max_queued_requests", "max_body_bytes"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        grace_s = self.shutdown_grace_s
        _require(0 <= grace_s <= _MAX_SECONDS, "shutdown_grace_s", grace_s, f"0 to {_MAX_SECONDS:g}")
        for name in ("rank_timeout_s", "step_timeout_s"):
            _require_seconds(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    weights: WeightOptions = field(default_factory=WeightOptions)
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        if self.parallel.link is not None and self.model.device == "cuda":
            raise ValueError("--link is between ranks on the CPU; give --device cpu, or leave --link out")


def option_fields() -> dict[str, tuple[str, Any]]:
    """Every option by name: the group it lives in and its dataclass field. Names are unique over the groups."""
    groups = {
        "model": ModelOptions,
        "parallel": ParallelOptions,
        "engine": EngineOptions,
        "weights": WeightOptions,
        "http": HttpOptions,
    }
    return {f.name: (group, f) for group, cls in groups.items() for f in fields(cls)}
