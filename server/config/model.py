"""Flags of the model."""

from dataclasses import dataclass

from tightwire.server.config.option import option, require


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model, in which numbers, on which device."""

    model: str = option("smollm2-135m", "a known name, a Hugging Face folder or repo id, a .gguf file, or random:SHAPE")
    served_model_name: str | None = option(None, "the name clients use; default: the model's own", metavar="NAME")
    device: str = option("auto", "where ranks run; auto takes CUDA when there is one", ("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "numbers of activations, the KV cache, and weights that are not packed; auto: the checkpoint's own (float16 and float32 files: bfloat16 on CPU)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "how weight matrices are kept in memory, whatever --dtype the activations have. auto: GGUF's Q8_0, Q4_0 and Q4_1 as "
        "the file holds them, all else as numbers of --dtype; none: everything as such numbers; int8, int4: floats are "
        "quantized when they are read (int4: but for the embedding and the head, which get 8 bits)",
        ("auto", "none", "int8", "int4"),
    )
    seed: int = option(0, "seed of random: weights and of requests that bring none (0: a fresh one per request)")

    def __post_init__(self) -> None:
        require(self.model != "", "model", self.model, "a name, a path or random:SHAPE")
        require(self.served_model_name != "", "served_model_name", self.served_model_name, "left out, or not empty")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
