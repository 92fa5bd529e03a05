"""The sizes of ``gpu_check.py``'s stages: those of a GPU, and small ones that rehearse the same commands on the emulated device."""

import os
from dataclasses import dataclass, field
from typing import Any

TINY = "build/gpu-check/tiny"  # as `gpu_programs.py models` makes it
SHAPE_70B = "build/gpu-check/70b/config.json"  # the layers of a Llama of 70 billion parameters, but fewer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Options of commands, by stage. ``tests``: pytest's -k by stage, None for no tests; without an entry all are run. Objects are for ``gpu_programs.py``."""

    model: str
    roofline: tuple[str, ...]
    kernels: tuple[str, ...]
    products: dict[str, Any]
    serve: tuple[str, ...] = ()  # options of servers, the last ones
    one: tuple[str, ...]  # the load of one request, as in the roofline
    loads: tuple[str, ...]
    warmups: str = "2"
    stream: tuple[str, ...]
    layers: tuple[str, ...] = ()  # how many of the served model are streamed
    model_70b: str
    transformers: dict[str, Any]
    uncompiled: dict[str, str] = field(default_factory=dict)  # environment
    train: tuple[str, ...]
    fsdp2: dict[str, Any]
    comm: tuple[str, ...] = ()
    tests: dict[str, str | None]


_CORES = os.cpu_count() or 1
_SHAPE = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 2816}
_SMALL_SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}


def _train(shape: dict[str, int], sequences: int, tokens: int, steps: int, *others: str) -> tuple[str, ...]:
    heads = f"model.shape.num_key_value_heads={shape['num_attention_heads']}"
    sizes = f"data.sequence_tokens={tokens}", f"schedule.steps={steps}"
    batch = f"batch.sequences={sequences}", f"batch.micro_sequences={sequences}"
    return (*(f"model.shape.{name}={number}" for name, number in shape.items()), heads, *sizes, *batch, *others)


FULL = Sizes(
    model="random:llama-3-8b",
    # Random words have unlike numbers of tokens, and the model has 8192 positions.
    roofline=("--prompt-len", "8000", "--batched-tokens", "4096"),
    kernels=("--sizes", "32MiB", "--repeats", "20", "--seconds-per-arm", "0.5"),
    products={
        "shapes": [[28672, 4096], [4096, 14336], [6144, 4096], [4096, 4096]],
        "repeats": 20,
        "all_bytes": 128 << 20,
    },
    one=("--concurrency", "1", "--num-requests", "3", "--input-len", "128", "--output-len", "64"),
    loads=("--concurrency", "1,16", "--num-requests", "4,32", "--input-len", "512", "--output-len", "128"),
    stream=("--batches", "1", "--repeats", "6", "--threads", str(_CORES)),
    layers=("--stream-layers", "16"),
    model_70b=f"random:{SHAPE_70B}",
    transformers={"model": "random:llama-3-8b", "prompt_len": 8000, "output_len": 64},
    train=_train(_SHAPE, 16, 512, 20),
    fsdp2={"shape": _SHAPE, "sequences": 16, "tokens": 512, "steps": 20, "device": "cuda"},
    tests={},
)
SMALL = Sizes(
    model=TINY,
    roofline=(
        "--prompt-len",
        "200",
        "--output-len",
        "4",
        "--crowd",
        "1",
        "--batched-tokens",
        "64",
        "--rate-size",
        "64",
    ),
    kernels=("--sizes", "4KiB", "--codecs", "int8", "--repeats", "1", "--seconds-per-arm", "0.01"),
    products={"shapes": [[64, 256]], "repeats": 1, "all_bytes": 0},
    serve=("--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "2"),
    one=("--concurrency", "1", "--num-requests", "1", "--input-len", "16", "--output-len", "4"),
    loads=("--concurrency", "2", "--num-requests", "2", "--input-len", "16", "--output-len", "4"),
    warmups="1",
    stream=("--batches", "1", "--repeats", "3", "--context", "16"),
    model_70b=f"random:{TINY}/config.json",
    transformers={"model": f"random:{TINY}/config.json", "prompt_len": 32, "output_len": 4},
    uncompiled={"TORCHDYNAMO_DISABLE": "1"},
    train=_train(_SMALL_SHAPE, 2, 16, 2, "log.tensorboard=false", "log.peak_tflops=1", "model.tokenizer=bpe:512"),
    fsdp2={"shape": _SMALL_SHAPE, "sequences": 2, "tokens": 16, "steps": 2, "device": "cpu"},  # DTensors need a device
    comm=("--sizes", "4KiB", "--repeats", "3"),
    tests={
        "tests of decode": "models_logits[1] or either_form[True]",
        "tests of kernels": "prompts_of_packed or quantized_on_the_device or test_packed_model",
        "tests of models": "model_drafts or own_ones[none]",
        "tests of the rest": "test_rules or has_the_losses",
        "tests of peers": None,
    },
)
