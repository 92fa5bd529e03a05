"""Every packed format of GGUF files against transformers in float32 with the numbers that the gguf library reads from it."""

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from harness import run_in_process
from helpers.model.loading import load_resident
from helpers.model.rank_logits import PROMPT, rank_logits
from helpers.model.tiny_gguf import make_tiny_gguf
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed_int8 import quantize_activations
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.checkpoint.tensors import EMBEDDING, gguf_name
from tightwire.model.open import formats_of, open_checkpoint
from tightwire.model.weights.formats import split_model

# Three superblocks of attention outputs, in one of which the group of a KV head ends, and five of MLP columns.
_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 1280,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
_NUM_TOKENS = PROMPT + 3
_RANKS = (1, 2, 3)
_every_format = pytest.mark.parametrize("kind", list(PACKED_FORMATS))
_every_split = pytest.mark.parametrize("num_ranks", _RANKS)


class _Reference(NamedTuple):
    """A file, and the logits that transformers has of its numbers."""

    path: str
    tokens: list[int]
    exact: Tensor  # in float32
    bfloat16_error: float  # of transformers in bfloat16, as a norm
    int8_error: float  # of transformers in float32, with the inputs of all matrices in 8 bits


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda kind: _reference(tmp_path_factory.mktemp(kind) / "m.gguf", kind))


def _reference(path: Path, kind: str) -> _Reference:
    make_tiny_gguf(path, kind, **_SIZES)
    model = _transformers(path)
    tokens = torch.randint(3, 300, (1, _NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    exact = _logits(model, tokens)
    hooks = [each.register_forward_pre_hook(_round_input) for each in model.modules() if isinstance(each, nn.Linear)]
    in_int8 = _logits(model, tokens)
    for hook in hooks:
        hook.remove()
    in_bfloat16 = _logits(model.bfloat16(), tokens)
    errors = [float((each - exact).norm()) for each in (in_bfloat16, in_int8)]
    return _Reference(str(path), tokens[0].tolist(), exact, *errors)


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens).logits[0].float()


def _round_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    codes, scales = quantize_activations(inputs[0].flatten(0, -2))
    return ((codes * scales[..., None]).view(inputs[0].shape),)


def _transformers(path: Path) -> PreTrainedModel:
    """The file in float32, by the gguf library's reader and numbers."""
    config = open_checkpoint(str(path)).config
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config_to_hf(config)), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, out in model.state_dict().items():
        each = stored[gguf_name(name) or ""]
        numbers = torch.from_numpy(np.array(dequantize(np.array(each.data), each.tensor_type))).view(out.shape)
        if ".q_proj." in name or ".k_proj." in name:
            numbers = numbers.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).reshape(out.shape)
        out.copy_(numbers)
    return model


def _ours(reference: _Reference, num_ranks: int, **options: Any) -> Tensor:
    return run_in_process(num_ranks, partial(rank_logits, **options), reference.path, reference.tokens)[0]


@_every_format
@_every_split
def test_logits_and_tokens_in_float32(kind: str, num_ranks: int, references) -> None:
    """The bound is that of models with plain weights; the greedy tokens are the same."""
    reference = references(kind)
    got = _ours(reference, num_ranks, dtype=torch.float32)
    assert (got - reference.exact).abs().max() < 2e-5 * reference.exact.abs().max()
    assert torch.equal(got.argmax(-1), reference.exact.argmax(-1))


@_every_format
@_every_split
def test_the_default_is_nearer_to_float32_than_transformers_in_bfloat16(kind: str, num_ranks: int, references) -> None:
    reference = references(kind)
    got = _ours(reference, num_ranks, dtype=torch.bfloat16)
    assert (got - reference.exact).norm() < reference.bfloat16_error


@_every_format
@_every_split
def test_activations_in_8_bits_cost_their_rounding(kind: str, num_ranks: int, references) -> None:
    """What transformers loses when the inputs of its matrices are rounded likewise, and what the rest in bfloat16 loses."""
    reference = references(kind)
    got = _ours(reference, num_ranks, dtype=torch.bfloat16, int8=True)
    assert (got - reference.exact).norm() < reference.int8_error + reference.bfloat16_error


@_every_format
def test_nothing_is_expanded_and_columns_are_cut_between_blocks(kind: str, references) -> None:
    checkpoint = open_checkpoint(references(kind).path)
    formats = formats_of(checkpoint, "auto")
    assert set(formats.packed.values()) == {PACKED_FORMATS[kind]} and not formats.plain
    assert formats.packed[EMBEDDING].name == kind
    units = {256: {2: [3, 2], 3: [2, 2, 1]}, 32: {2: [20, 20], 3: [14, 13, 13]}}[PACKED_FORMATS[kind].block_elems]
    for num_ranks, counts in units.items():
        columns = [len(each.mlp_columns) for each in split_model(checkpoint.config, formats, num_ranks).shards]
        assert columns == [1280 // sum(counts) * count for count in counts]


@_every_format
@_every_split
def test_a_token_reads_the_bytes_of_the_files_layers_and_head(kind: str, num_ranks: int, references) -> None:
    """All ranks together, within 5 %: norms have 16 bits in place of 32, and some KV heads are on two ranks."""
    path = references(kind).path
    checkpoint = open_checkpoint(path)
    formats = formats_of(checkpoint, "auto")
    num_read = 0
    for shard in split_model(checkpoint.config, formats, num_ranks).shards:
        weights = load_resident(checkpoint.reader(), checkpoint.config, shard, dtype=torch.bfloat16, formats=formats)
        for part in (*weights.layers, weights.outer):
            held = (getattr(part, name) for name in part.__slots__ if name != "embedding")
            num_read += sum(each.nbytes for each in held if each is not None)
    stored = sum(each.n_bytes for each in gguf.GGUFReader(path).tensors if each.name != "token_embd.weight")
    assert num_read == pytest.approx(stored, rel=0.05)
