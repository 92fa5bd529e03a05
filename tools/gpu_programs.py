"""Programs of ``gpu_check.py`` that run on the device: ``python tools/gpu_programs.py NAME '{OPTIONS}'`` ends with a line of JSON."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_sizes import SHAPE_70B, TINY

from tightwire.bench.kernels.arms import seconds_per_call
from tightwire.bench.lab.peers.layer_parts import time_transformers
from tightwire.kernels.linear import linear
from tightwire.kernels.packed import arrange
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import PackedMatrix, Weight
from tightwire.model.checkpoint.header import RANDOM_SHAPES
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.open import open_checkpoint

_FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
_MOST_MATRICES = 16
_LAYERS_70B = 3  # the fewest that are streamed: the CPU quantizes them, in a minute


def facts() -> dict[str, Any]:
    import triton

    devices = range(torch.cuda.device_count())
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "devices": [torch.cuda.get_device_name(number) for number in devices],
        "free_bytes": [torch.cuda.mem_get_info(number)[0] for number in devices],
    }


def models() -> str:
    """Write the tiny model, and the configuration of 70 billion parameters with fewer layers."""
    from tiny import make_tiny

    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    make_tiny(Path(TINY), num_hidden_layers=3, **sizes)
    shape = replace(RANDOM_SHAPES["llama-3-70b"], num_layers=_LAYERS_70B)
    Path(SHAPE_70B).parent.mkdir(exist_ok=True)
    Path(SHAPE_70B).write_text(json.dumps(config_to_hf(shape)))
    return TINY


def products(shapes: Sequence[tuple[int, int]], repeats: int, all_bytes: int) -> dict[str, Any]:
    """Seconds of one row with a matrix of each shape, by format, and of all together beside bfloat16's. The numbers are random bytes.

    ``all_bytes``: of the matrices that take turns, more than the device's last cache.
    """
    device, rows, found = torch.device("cuda", 0), list[dict[str, Any]](), dict[str, Any]()
    for num_outputs, num_inputs in shapes:
        x_1D = torch.randn(1, num_inputs, device=device).bfloat16()
        for name in ("bfloat16", *_FORMATS):
            first = _matrix(name, num_outputs, num_inputs, device)
            count = max(2, min(_MOST_MATRICES, all_bytes // first.nbytes))
            matrices = [first, *(_matrix(name, num_outputs, num_inputs, device) for _ in range(count - 1))]

            def call(i: int, x: torch.Tensor = x_1D, matrices: Sequence[Weight] = matrices) -> object:
                return linear(x, matrices[i % len(matrices)])

            seconds = statistics.median(seconds_per_call(call, device, repeats=repeats, limit_s=1.0))
            rows.append({"shape": [num_outputs, num_inputs], "format": name, "seconds": seconds, "bytes": first.nbytes})
        total_s = {
            name: sum(row["seconds"] for row in rows if row["format"] == name) for name in ("bfloat16", *_FORMATS)
        }
        found = {"rows": rows, "of_bfloat16": {name: total_s[name] / total_s["bfloat16"] for name in _FORMATS}}
        _tell(found)
    return found


def _matrix(name: str, num_outputs: int, num_inputs: int, device: torch.device) -> Weight:
    if name == "bfloat16":
        return torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device=device)
    packed = PACKED_FORMATS[name]
    shape = num_outputs, packed.row_bytes(num_inputs)
    return arrange(PackedMatrix(torch.randint(0, 256, shape, dtype=torch.uint8, device=device), packed))


def transformers(model: str, prompt_len: int, output_len: int) -> dict[str, float]:
    """Seconds of a prompt, with the library's attention and not compiled, and of a generated token, compiled with a static cache."""
    config, device = open_checkpoint(model).config, torch.device("cuda", 0)
    prompt_s = _prompt_s(config_to_hf(config), prompt_len, device)
    _tell({"prompt_s": prompt_s})  # compiling may outlast the stage
    torch.cuda.empty_cache()  # of that model
    [token_s] = time_transformers(SimpleNamespace(device=device), config, 128, output_len)  # pyright: ignore[reportArgumentType]
    return {"prompt_s": prompt_s, "token_s": token_s}


def _tell(found: Any) -> None:
    """Print what is known so far: what a stage whose time is over has measured."""
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()


@torch.inference_mode()
def _prompt_s(config: dict[str, Any], prompt_len: int, device: torch.device) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with device:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    prompt = torch.ones(1, prompt_len, dtype=torch.long, device=device)
    return _median_s(lambda: model(prompt, use_cache=True, logits_to_keep=1))


def _median_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def fsdp2(shape: dict[str, int], sequences: int, tokens: int, steps: int, device: str) -> dict[str, float]:
    """Tokens a second of torch's FSDP2 on one rank: bfloat16 in a step, sums and AdamW in float32, as `tightwire train`."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=4096, max_position_embeddings=tokens)).to(device)  # pyright: ignore
    how: Any = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for block in model.model.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    ids = torch.randint(0, 256, (sequences, tokens), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return {"tokens_per_s": sequences * tokens / statistics.median(seconds[steps // 2 :])}


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (facts, models, products, transformers, fsdp2)
}

if __name__ == "__main__":
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    _tell(PROGRAMS[sys.argv[1]](**options))
