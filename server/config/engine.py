"""Flags of scheduling and the KV cache."""

from dataclasses import dataclass, fields

from tightwire.server.config.option import option, require

_SPECULATION = ("speculative_tokens", "speculative_max_seqs", "ngram_max", "ngram_min")  # mean nothing without one
_MAX_GUESSES = 64  # also of sequences and of last tokens looked for: beyond, checking costs more than it can bring


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How much runs at once."""

    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens; default: the model's context, less if memory is short",
        metavar="N",
    )
    max_num_seqs: int = option(64, "sequences in one step, of each replica", metavar="N")
    max_num_batched_tokens: int = option(
        512, "tokens in one step, of each replica; longer prompts are prefilled in chunks", metavar="N"
    )
    block_size: int = option(16, "tokens per KV cache block", metavar="N")
    prefix_cache: str = option(
        "prompts",
        "what requests that begin alike share of the KV cache: prompts, whose numbers do not depend on what runs beside "
        "them (on a CPU); all, generated tokens too, so a chat goes on sooner (in 16-bit numbers a text may then differ by "
        "rounding); or none",
        ("none", "prompts", "all"),
    )
    kv_cache_memory: int | None = option(
        None,
        "bytes of KV cache over all ranks, such as 2GiB; default: what max_num_seqs needs, at most a share of memory",
        metavar="BYTES",
    )
    kv_offload: bool = option(
        False,
        "keep the KV cache in host memory, for batches whose cache the device has no room for: a layer's keys and values "
        "of a step's sequences come to the device while the layer before is computed, through two slots. Every step then "
        "waits for what of their way takes longer than computing; CUDA graphs are off",
    )
    kv_slot_tokens: int | None = option(
        None,
        "with --kv-offload, most tokens in the cache that the sequences of one step may have together, for which each slot "
        "has room; default: all, as far as the device's memory goes",
        metavar="N",
    )
    cuda_graphs: bool = option(
        True,
        "on CUDA, capture the steps of generated tokens and replay them; without, each kernel is launched by the host",
    )
    plan_ahead: str = option(
        "auto",
        "plan and launch each step while the one before it still runs, so that a device need not wait for the host in "
        "between: on, off, or auto, which does it on CUDA, as on a CPU the cores that would plan are those that compute. "
        "The answers are the same; a prompt that arrives may wait for one step more. Not beside --dp",
        ("auto", "on", "off"),
    )
    speculation: str = option(
        "none",
        "guess tokens ahead and check several in one step: ngram guesses what followed when the last tokens stood in the "
        "text before. The answer is the same (on a CPU to the bit), sooner where it repeats its prompt",
        ("none", "ngram"),
    )
    speculative_tokens: int = option(5, "most tokens guessed at a time", metavar="N")
    speculative_max_seqs: int = option(16, "with more sequences in a step nothing is guessed", metavar="N")
    ngram_max: int = option(4, "most last tokens that must have stood before for a guess", metavar="N")
    ngram_min: int = option(2, "fewest", metavar="N")

    def __post_init__(self) -> None:
        for own in fields(self):
            choices, value = own.metadata["choices"], getattr(self, own.name)
            require(not choices or value in choices, own.name, value, f"one of {', '.join(choices)}")
            if own.name in _SPECULATION and self.speculation == "none":
                require(value == own.default, own.name, value, "left out, or given beside --speculation ngram")
        for name in ("speculative_tokens", "speculative_max_seqs", "ngram_min"):
            require(1 <= getattr(self, name) <= _MAX_GUESSES, name, getattr(self, name), f"1 to {_MAX_GUESSES}")
        tokens = self.kv_slot_tokens
        require(tokens is None or self.kv_offload, "kv_slot_tokens", tokens, "left out, or given beside --kv-offload")
        require(tokens is None or tokens >= 1, "kv_slot_tokens", tokens, "at least 1")
        want = f"--ngram-min ({self.ngram_min}) to {_MAX_GUESSES}"
        require(self.ngram_min <= self.ngram_max <= _MAX_GUESSES, "ngram_max", self.ngram_max, want)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            self.max_model_len is None or self.max_model_len >= 2, "max_model_len", self.max_model_len, "at least 2"
        )
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least --max-num-seqs ({self.max_num_seqs}), or running sequences could not all take a step",
        )
