"""Broken files end in a ModelError that names the file and the fault, soon and without much memory; nothing crashes."""

import json
import math
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.broken_gguf import Parts, number, numbers, text, texts
from safetensors.torch import load_file, save_file
from tiny import make_tiny, tiny_config

from tightwire.__main__ import main
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.open import open_checkpoint

_MOST_S = 10.0  # a busy machine's; each takes some milliseconds
_MOST_BYTES = 64 << 20
_GIB2, _NAN = 1 << 31, float("nan")
_QUERY = "blk.0.attn_q.weight"

Change = Callable[[Parts], object]


def key(name: str, value: bytes | None) -> Change:
    return lambda parts: parts.set(name, value)


def tensor(name: str, **fields: Any) -> Change:
    def change(parts: Parts) -> None:
        parts.tensors = [replace(entry, **fields) if entry.name == name else entry for entry in parts.tensors]

    return change


def attribute(**fields: Any) -> Change:
    return lambda parts: [setattr(parts, name, value) for name, value in fields.items()]


def first_scale(value: float) -> Change:
    return lambda parts: tensor(_QUERY, data=struct.pack("<e", value) + parts.tensor(_QUERY).data[2:])(parts)


def norm_value(value: float) -> Change:
    name = "blk.1.ffn_norm.weight"
    return lambda parts: tensor(name, data=struct.pack("<f", value) + parts.tensor(name).data[4:])(parts)


def no_tensor(name: str) -> Change:
    return lambda parts: setattr(parts, "tensors", [entry for entry in parts.tensors if entry.name != name])


def tokens(change: Callable[[list[str]], list[str]]) -> Change:
    return key("tokenizer.ggml.tokens", texts(change([f"<{i}>" for i in range(304)])))


def both(*changes: Change) -> Change:
    return lambda parts: [change(parts) for change in changes]


GGUF: dict[str, tuple[Change, str]] = {
    "magic": (attribute(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (attribute(version=1), "version is 1; supported: 2, 3"),
    "version 4": (attribute(version=4), "version is 4"),
    "big-endian": (attribute(version=3 << 24), "big-endian"),
    "2**60 keys": (attribute(num_keys=1 << 60), "keys and .* would need"),
    "2**60 tensors": (attribute(num_tensors=1 << 60), "tensors would need"),
    "one tensor more": (lambda parts: setattr(parts, "num_tensors", len(parts.tensors) + 1), "tensor"),
    "unknown tensor type": (tensor(_QUERY, kind=999), f"{_QUERY} has the unknown type 999"),
    "type that is not supported": (tensor("blk.0.attn_norm.weight", kind=26), "quantization type I32"),
    "rows of no numbers": (tensor(_QUERY, dims=(0, 64)), f"{_QUERY} has rows of 0 numbers"),
    "no rows": (tensor(_QUERY, dims=(64, 0)), f"tensor {_QUERY}"),
    "no dimensions": (tensor(_QUERY, dims=()), f"{_QUERY} has 0 dimensions"),
    "five dimensions": (tensor(_QUERY, dims=(64, 1, 1, 1, 64)), f"{_QUERY} has 5 dimensions"),
    "an extra dimension": (tensor(_QUERY, dims=(64, 128, 1)), "has shape"),
    "huge dimensions": (tensor(_QUERY, dims=(1 << 62, 4)), f"{_QUERY} should end at"),
    "dimensions that overflow": (tensor(_QUERY, dims=(1 << 63, 1 << 63)), f"{_QUERY} should end at"),
    "rows of broken blocks": (tensor(_QUERY, dims=(63, 64)), f"{_QUERY} has rows of 63 numbers in Q8_0"),
    "fewer rows": (tensor(_QUERY, dims=(64, 32)), "q_proj.weight has shape"),
    "an offset outside": (tensor(_QUERY, offset=1 << 40), f"{_QUERY} should end at"),
    "a huge offset": (tensor(_QUERY, offset=(1 << 64) - 32), f"{_QUERY} should end at"),
    "overlapping tensors": (tensor(_QUERY, offset=0), "overlaps"),
    "a misaligned tensor": (tensor(_QUERY, offset=17), f"{_QUERY} begins at 17"),
    "a missing tensor": (no_tensor("blk.1.ffn_down.weight"), "blk.1.ffn_down.weight is missing"),
    "no embedding": (no_tensor("token_embd.weight"), "token_embd.weight is missing"),
    "a doubled tensor": (lambda parts: parts.tensors.append(parts.tensor(_QUERY)), f"{_QUERY} stands in it twice"),
    "a quantized vector": (tensor("blk.0.attn_norm.weight", kind=8), "blk.0.attn_norm.weight"),
    "a string of 2 GiB": (key("x", struct.pack("<IQ", 8, _GIB2)), "key x: a string would need|key x: strings would"),
    "an array of 2 GiB": (key("x", struct.pack("<IIQ", 9, 0, _GIB2)), "key x: an array"),
    "2**31 strings": (key("x", struct.pack("<IIQ", 9, 8, _GIB2)), "key x: an array of 2147483648 strings would need"),
    "2**63 numbers": (key("x", struct.pack("<IIQ", 9, 12, 1 << 63)), "key x: an array"),
    "an array of arrays": (key("x", struct.pack("<IIQIQ", 9, 9, 1, 0, 0)), "key x: arrays of arrays"),
    "a doubled key of 1 MB": (
        lambda parts: parts.keys.extend([("k" * 1_000_000, number(1))] * 2),
        "key k{60} stands in it twice",
    ),
    "an architecture of 1 MB": (key("general.architecture", text("z" * 1_000_000)), "architecture 'z{59} is not"),
    "an unknown key type": (key("x", struct.pack("<II", 77, 0)), "key x: unknown type 77"),
    "a doubled key": (lambda parts: parts.keys.append(parts.keys[0]), "stands in it twice"),
    "alignment 0": (key("general.alignment", number(0)), "alignment must be a power of two"),
    "alignment 33": (key("general.alignment", number(33)), "alignment must be a power of two"),
    "alignment a word": (key("general.alignment", text("32")), "alignment must be a power of two"),
    "no architecture": (key("general.architecture", None), "architecture"),
    "architecture a number": (key("general.architecture", number(7)), "architecture '7' is not supported"),
    "no layers": (key("llama.block_count", number(0)), "llama.block_count"),
    "a billion layers": (key("llama.block_count", number(10**9)), "block_count is 1000000000; possible: 1 to"),
    "layers are missing": (key("llama.block_count", None), "llama.block_count is missing"),
    "no heads": (key("llama.attention.head_count", number(0)), "head_count"),
    "heads a word": (key("llama.attention.head_count", text("four")), "head_count is 'four'"),
    "heads for each layer": (key("llama.attention.head_count", numbers([4, 2])), "differs between layers"),
    "an empty list of heads": (key("llama.attention.head_count", numbers([])), "head_count"),
    "KV heads that do not divide": (key("llama.attention.head_count_kv", number(3)), "num_kv_heads=3"),
    "odd heads": (
        both(
            *(
                key(f"llama.{name}", number(31))
                for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
            )
        ),
        "head_dim=31 is odd",
    ),
    "a negative size": (key("llama.embedding_length", number(-1, "i")), "embedding_length is -1"),
    "a fractional context": (key("llama.context_length", number(0.5, "f")), "context_length is 0.5"),
    "a rope base in words": (key("llama.rope.freq_base", text("big")), "metadata is damaged: .*big"),
    "a rope base of 0": (key("llama.rope.freq_base", number(0, "f")), "rope_theta must be a number above 0"),
    "a rope base that is no number": (
        key("llama.rope.freq_base", number(_NAN, "f")),
        "rope_theta must be a number above 0",
    ),
    "a rope factor that is no number": (
        both(key("llama.rope.scaling.type", text("linear")), key("llama.rope.scaling.factor", number(_NAN, "f"))),
        "a factor of rope scaling must be a number above 0, got nan",
    ),
    "an epsilon that is no number": (
        key("llama.attention.layer_norm_rms_epsilon", number(_NAN, "f")),
        "norm_eps must be a number above 0",
    ),
    "a mixture of experts": (key("llama.expert_count", number(8)), "mixture of experts"),
    "no tokenizer": (key("tokenizer.ggml.tokens", None), "has no tokenizer"),
    "tokens a number": (key("tokenizer.ggml.tokens", number(5)), "tokenizer|metadata"),
    "more tokens than rows": (tokens(lambda own: [*own, "more"]), "305 tokens"),
    "token types are missing": (key("tokenizer.ggml.token_type", numbers([1] * 7)), "304 tokens with 7 types"),
    "scores are missing": (key("tokenizer.ggml.model", text("llama")), "304 tokens but 0 scores"),
    "an unknown tokenizer": (key("tokenizer.ggml.model", number(3)), "tokenizer model 3"),
    "merges without spaces": (key("tokenizer.ggml.merges", texts(["ab"])), "merge"),
    "merges of unknown tokens": (key("tokenizer.ggml.merges", texts(["ab cd"])), "merge"),
    "a template that is no text": (key("tokenizer.chat_template", number(3)), "chat_template"),
    "an end token outside": (
        key("tokenizer.ggml.eos_token_id", number(10**9)),
        "eos_token_id must be a token below 304",
    ),
    "an end token in words": (
        key("tokenizer.ggml.eos_token_id", text("</s>")),
        "eos_token_id must be a token below 304",
    ),
    "a scale that is no number": (
        first_scale(_NAN),
        f"{_QUERY} has scales or vectors that are infinite or no numbers",
    ),
    "an infinite scale": (first_scale(math.inf), f"{_QUERY} has scales or vectors that are infinite or no numbers"),
    "a norm that is no number": (norm_value(_NAN), "blk.1.ffn_norm.weight"),
}


def read_all(model: Path) -> None:
    """Open the model and its tokenizer, and read what a server does."""
    checkpoint = open_checkpoint(str(model))
    checkpoint.tokenizer()
    for name, shape in expected_tensors(checkpoint.config):
        checkpoint.reader().read_into(torch.empty(shape), name, rows=range(shape[0]))


def peak_bytes() -> int:
    """The most memory that this process has had since ``reset_peak``."""
    return int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def refuse(model: Path, words: str) -> None:
    """Check that ``model`` is refused with ``words`` and its name, quickly and without much memory."""
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before_bytes, start_s = peak_bytes(), time.perf_counter()
    with pytest.raises(ModelError) as caught:
        read_all(model)
    assert time.perf_counter() - start_s < _MOST_S
    assert peak_bytes() - before_bytes < _MOST_BYTES
    message = str(caught.value)
    assert re.search(words, message), message
    assert model.name in message, message
    assert len(message) < 1200 and "\n" not in message, message


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return Parts.of_tiny(tmp_path_factory.mktemp("good") / "tiny.gguf")


def test_the_parts_together_are_a_good_file(good: Parts, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(good.to_bytes())
    read_all(tmp_path / "m.gguf")


@pytest.mark.parametrize("fault", GGUF)
def test_a_broken_gguf(good: Parts, tmp_path: Path, fault: str) -> None:
    change, words = GGUF[fault]
    parts = replace(good, keys=[*good.keys], tensors=[*good.tensors])
    change(parts)
    (tmp_path / "broken.gguf").write_bytes(parts.to_bytes())
    refuse(tmp_path / "broken.gguf", words)


@pytest.mark.parametrize("share", [0, 3, 4, 10, 24, 40, 500, 0.02, 0.1, 0.5, 0.9, -1])
def test_a_truncated_gguf(good: Parts, tmp_path: Path, share: float) -> None:
    data = good.to_bytes()
    last = len(good.tensors[-1].data)
    data = data[: len(data) - (-last % 32)]  # without the padding behind the last tensor
    (tmp_path / "cut.gguf").write_bytes(data[: int(share * len(data)) if isinstance(share, float) else share])
    refuse(tmp_path / "cut.gguf", "truncated")


def safetensors(folder: Path, change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> None:
    """Write a file with its header and data changed."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, rest = change(json.loads(data[8:start]), data[start:])
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + rest)


def entry(name: str, **fields: Any) -> Callable[[Path], object]:
    return lambda folder: safetensors(folder, lambda header, rest: ({**header, name: {**header[name], **fields}}, rest))


def whole(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def cut(share: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return change


def index(content: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def config(**keys: Any) -> Callable[[Path], object]:
    return whole("config.json", json.dumps(tiny_config(**keys)).encode())


_V, _NORM = "model.layers.0.self_attn.v_proj.weight", "model.layers.1.input_layernorm.weight"
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty file": (whole("model.safetensors", b""), "model.safetensors: truncated"),
    "a third of a file": (cut(0.3), "model.safetensors: truncated"),
    "nearly a file": (cut(0.99), "model.safetensors: truncated"),
    "a few bytes": (whole("model.safetensors", b"12345"), "model.safetensors: truncated"),
    "a header of 2 GiB": (whole("model.safetensors", struct.pack("<Q", _GIB2) + b"{}"), "model.safetensors: truncated"),
    "a header of 2**63 bytes": (whole("model.safetensors", struct.pack("<Q", 1 << 63) + b"{}"), "truncated"),
    "a header that is no JSON": (whole("model.safetensors", struct.pack("<Q", 4) + b"abcd"), "header is damaged"),
    "a git-lfs pointer": (whole("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), "git-lfs pointer"),
    "tensors that overlap": (entry(_V, data_offsets=[0, 64]), "model.safetensors: truncated, or its"),
    "a negative offset": (entry(_V, data_offsets=[-4, 0]), "header is damaged"),
    "an unknown type": (entry(_V, dtype="F31"), "header is damaged"),
    "a type of another size": (entry(_V, dtype="F16"), "header is damaged"),
    "a shape of another size": (entry(_V, shape=[7, 7]), "header is damaged"),
    "another shape": (changed(lambda w: w.update({_V: w[_V].t().contiguous()})), "v_proj.weight has shape"),
    "integers": (changed(lambda w: w.update({_V: w[_V].int()})), "is I32; supported"),
    "a missing tensor": (changed(lambda w: w.pop(_NORM)), f"{_NORM} is missing"),
    "a norm that is no number": (changed(lambda w: w[_NORM].fill_(_NAN)), f"{_NORM} has scales or vectors that"),
    "a missing shard": (index({"weight_map": {_V: "model-00002-of-00002.safetensors"}}), "shards are missing"),
    "an index of files elsewhere": (index({"weight_map": {_V: "../other/model.safetensors"}}), "outside"),
    "an index of absolute paths": (index({"weight_map": {_V: "/etc/passwd"}}), "outside"),
    "an index of numbers": (index({"weight_map": {_V: 7}}), "shards are missing: 7"),
    "an index of a name that is too long": (index({"weight_map": {_V: "a" * 300}}), "shards are missing: aaa"),
    "an index without a map": (index({"metadata": {}}), "has no weight_map"),
    "an index that is a list": (index([]), "is not a JSON object"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "needs model.safetensors"),
    "config: no JSON": (whole("config.json", b"{"), "cannot be read as JSON"),
    "config: bytes": (whole("config.json", bytes(range(256))), "cannot be read as JSON"),
    "config: brackets": (whole("config.json", b"[" * 100_000), "cannot be read as JSON"),
    "config: a list": (whole("config.json", b"[]"), "is not a JSON object"),
    "config: empty": (whole("config.json", b"{}"), "config.json"),
    "config: a size in words": (config(hidden_size="64"), "hidden_size must be a whole number"),
    "config: no heads": (config(num_attention_heads=0), "num_attention_heads must be a whole number"),
    "config: negative layers": (config(num_hidden_layers=-1), "num_hidden_layers must be a whole number"),
    "config: a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "config: a billion rows": (config(vocab_size=10**12), "embed_tokens.weight has shape"),
    "config: odd heads": (config(head_dim=15), "head_dim=15 is odd"),
    "config: no base": (config(rope_parameters={"rope_type": "default", "rope_theta": -1}), "rope_theta must be"),
    "config: a base in words": (config(rope_theta="big"), "config.json"),
    "config: an epsilon that is infinite": (config(rms_norm_eps=math.inf), "norm_eps must be"),
    "config: an unknown rope": (config(rope_scaling={"rope_type": "spiral"}), "spiral"),
    "config: a rope factor of 0": (config(rope_scaling={"rope_type": "linear", "factor": 0}), "a factor of rope"),
    "config: a rope factor that is no number": (
        config(rope_scaling={"rope_type": "linear", "factor": _NAN}),
        "got nan",
    ),
    "templates that are numbers": (
        whole("tokenizer_config.json", b'{"chat_template": [7, {"name": "default", "template": 8}]}'),
        "chat_template is 8, and",
    ),
    "a template that is a number": (whole("tokenizer_config.json", b'{"chat_template": 7}'), "chat_template is 7, and"),
    "a template that is no text": (whole("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja: cannot be read"),
    "config: rope in words": (config(rope_scaling="yes"), "config.json"),
    "config: a dtype of integers": (config(dtype="int8"), "dtype 'int8' is not supported"),
    "config: an end token in words": (config(eos_token_id="</s>"), "eos_token_id|wrong type"),
    "config: architectures a number": (config(architectures=7), "config.json"),
    "config: experts": (config(architectures=["MixtralForCausalLM"]), "mixture of experts"),
    "config: a hybrid": (config(architectures=["FalconH1ForCausalLM"]), "FalconH1ForCausalLM"),
    "config: vision": (config(architectures=["Qwen2VLForConditionalGeneration"]), "Qwen2VL"),
    "config: an encoder": (config(architectures=["BertModel"]), "BertModel"),
    "config: quantized by a word": (config(quantization_config="awq"), "quantization_config"),
    "config: quantized by a list": (config(quantization_config=[4]), "quantization_config"),
    "config: quantized by nobody": (config(quantization_config={"quant_method": "magic"}), "quantized by 'magic'"),
    "config: quantized by a list of methods": (config(quantization_config={"quant_method": ["awq"]}), "quantized by"),
    "config: 3 bits": (config(quantization_config={"quant_method": "gptq", "bits": 3}), "3 bits"),
    "config: bits in words": (config(quantization_config={"quant_method": "gptq", "bits": "four"}), "config.json"),
    "config: groups of 7": (
        config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 7}),
        "groups of 7 numbers",
    ),
    "config: quantized, but the weights are not": (
        config(quantization_config={"quant_method": "compressed-tensors", "config_groups": 3}),
        "config.json",
    ),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_broken_folder(tmp_path: Path, fault: str) -> None:
    change, words = FOLDERS[fault]
    change(make_tiny(tmp_path / "broken"))
    refuse(tmp_path / "broken", words)


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config"])
def test_serve_refuses_a_broken_model_in_one_line(
    good: Parts, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny(tmp_path / "broken")
    path, words = folder, ""
    if kind == "gguf":
        path = tmp_path / "broken.gguf"
        path.write_bytes(good.to_bytes()[:5000])
        words = f"{path}: not a GGUF file, or truncated"
    elif kind == "safetensors":
        cut(0.5)(folder)
        words = f"{folder}/model.safetensors: truncated"
    else:
        config(architectures=["MixtralForCausalLM"])(folder)
        words = "mixture of experts"
    assert main(["serve", str(path), "--port", "0"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    last = said.err.splitlines()[-1]  # a slow start shows its stages before
    assert last.startswith("tightwire serve: ") and words in last
