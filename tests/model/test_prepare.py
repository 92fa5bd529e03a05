"""A prepared folder holds the numbers that ranks load and needs no other files; a failure leaves nothing."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.loading import load_resident
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.local_engine import prompt_logits
from tiny import VARIANTS, make_tiny

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.group import in_process_groups
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.cache.kv_cache import KVCache
from tightwire.model.checkpoint.errors import ModelError, PrepareError
from tightwire.model.decoder import Llama
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.parallel import TensorParallel
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.load import load_weights
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.prepared.manifest import MANIFEST
from tightwire.model.weights.source import LayerWeights, OuterWeights, ResidentWeights
from tightwire.model.weights.streamed import StreamedWeights

CPU = torch.device("cpu")


def prepared_of(model: str | Path, out: Path, **options: Any) -> Prepared:
    """Make the folder, with float32 for plain numbers unless ``options`` say else, and open it."""
    prepare(open_checkpoint(str(model)), out, PrepareOptions(**{"dtype": "float32", **options}))
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    return prepared


def same(left: Matrix | None, right: Matrix | None) -> bool:
    if isinstance(left, PackedMatrix) and isinstance(right, PackedMatrix):
        return left.format == right.format and torch.equal(left.blocks_OB, right.blocks_OB)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left is None and right is None


def assert_same(got: LayerWeights | OuterWeights, want: LayerWeights | OuterWeights) -> None:
    assert type(got) is type(want)
    unlike = [name for name in want.__slots__ if not same(getattr(got, name), getattr(want, name))]
    assert unlike == []


def load_prepared(prepared: Prepared, rank: int) -> tuple[OuterWeights, list[LayerWeights]]:
    """All tensors of one rank."""
    store = prepared.store(rank)
    weights = load_weights(store, EVERYTHING_RESIDENT, device=CPU, timeout_s=1.0)
    assert isinstance(weights, ResidentWeights)
    return weights.outer, list(weights.layers)


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {  # kind, keys of config.json, --quantization
    "plain": ("", {}, "none"),
    "tied": ("", VARIANTS["tied"], "none"),
    "biases": ("", VARIANTS["mlp-bias"], "none"),
    "int8": ("", {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}, "int8"),
    "int4": ("", {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}, "int4"),
    "gguf": ("Q4_1", {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3}, "auto"),
}


@pytest.mark.parametrize(("name", "dtype"), [("plain", "float32"), *((name, "bfloat16") for name in sorted(MODELS))])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_prepared_folder_holds_the_tensors_that_ranks_load(tmp_path: Path, name: str, tp: int, dtype: str) -> None:
    kind, keys, quantization = MODELS[name]
    model = make_tiny_gguf(tmp_path / "m.gguf", kind, **keys) if kind else make_tiny(tmp_path / "m", **keys)
    checkpoint = open_checkpoint(str(model))
    formats = choose_formats(checkpoint.reader(), checkpoint.config, quantization)
    prepared = prepared_of(model, tmp_path / "out", tp=tp, dtype=dtype, quantization=quantization)
    assert (prepared.tp, prepared.manifest.shares, prepared.formats) == (tp, None, formats)
    for shard in make_layout(checkpoint.config, tp).shards:
        want = load_resident(
            checkpoint.reader(),
            checkpoint.config,
            shard,
            dtype=getattr(torch, dtype),
            formats=formats,
        )
        outer, layers = load_prepared(prepared, shard.rank)
        assert_same(outer, want.outer)
        for got, layer in zip(layers, want.layers, strict=True):
            assert_same(got, layer)


@pytest.mark.parametrize("codec", ["int8-g64", "int4-g64"])
def test_a_codec_takes_the_layers_plain_matrices_and_nothing_else(tmp_path: Path, codec: str) -> None:
    model = make_tiny(tmp_path / "m", dtype="bfloat16", **VARIANTS["mlp-bias"], head_dim=32)
    checkpoint = open_checkpoint(str(model))
    options = {"tp": 2, "dtype": "bfloat16", "quantization": "none"}
    prepared = prepared_of(model, tmp_path / "out", codec=codec, **options)
    whole = prepared_of(model, tmp_path / "whole", **options)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "none")
    assert prepared.manifest.num_bytes < whole.manifest.num_bytes
    for shard in make_layout(checkpoint.config, 2).shards:
        loaded = load_resident(checkpoint.reader(), checkpoint.config, shard, dtype=torch.bfloat16, formats=formats)
        outer, layers = load_prepared(prepared, shard.rank)
        assert_same(outer, loaded.outer)
        for got, layer in zip(layers, loaded.layers, strict=True):
            for name in layer.__slots__:
                value = getattr(layer, name)
                if isinstance(value, torch.Tensor) and value.dim() == 2:
                    made = parse_codec(codec)
                    value = made.decode(made.encode(value.flatten()), value.numel(), value.dtype).view(value.shape)
                assert same(getattr(got, name), value), name


def test_shares_are_kept(tmp_path: Path) -> None:
    prepared = prepared_of(make_tiny(tmp_path / "m"), tmp_path / "out", tp=2, shares=(3.0, 1.0))
    assert prepared.manifest.shares == (3.0, 1.0)
    assert prepared.layout == make_layout(prepared.config, 2, (3.0, 1.0)) != make_layout(prepared.config, 2)


def runner_of(checkpoint: Checkpoint, quantization: str, *, int8: bool = False) -> ModelRunner:
    (group,) = in_process_groups(1)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, quantization)
    return build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, 1),
        RankGroups(group),
        RunnerOptions(
            dtype=torch.float32,
            max_model_len=128,
            num_blocks=8,
            block_size=16,
            formats=formats.with_int8_activations() if int8 else formats,
        ),
    )


def streamed_logits(prepared: Prepared, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of one rank, with layer 0 kept in memory and the others out of the file."""
    (group,) = in_process_groups(1)
    outer, layers = load_prepared(prepared, 0)
    store = prepared.store(0)
    weights = StreamedWeights(outer, {0: layers[0]}, store, prepared.packed(0).plain, CPU, timeout_s=20)
    cache = KVCache(
        prepared.config, prepared.layout.shards[0], num_blocks=8, block_size=16, dtype=torch.float32, device=CPU
    )
    model = Llama(prepared.config, TensorParallel(group, prepared.layout, None), weights, cache, 128)
    runner = ModelRunner(model, TokenChooser([range(prepared.config.vocab_size)], 0, CPU, lambda x, phase: [x]))
    weights.start()
    try:
        return [prompt_logits(runner, prompt) for prompt in prompts]
    finally:
        weights.close()


@pytest.mark.parametrize(("quantization", "int8"), [("none", False), ("int8", False), ("int8", True)])
def test_streamed_from_the_disk_gives_the_same_logits(tmp_path: Path, quantization: str, int8: bool) -> None:
    model = make_tiny(tmp_path / "m", num_hidden_layers=6, head_dim=32)
    runner = runner_of(open_checkpoint(str(model)), quantization, int8=int8)
    prompts = [[1, 2, 3], list(range(40)), [7]]
    prepared = replace(prepared_of(model, tmp_path / "out", quantization=quantization), int8_activations=int8)
    for got, prompt in zip(streamed_logits(prepared, prompts), prompts, strict=True):
        assert torch.equal(got, prompt_logits(runner, prompt))


def test_streamed_through_a_codec_gives_logits_of_what_the_codec_keeps(tmp_path: Path) -> None:
    """Eight bits of a tiny model are close to it, and not the same."""
    model = make_tiny(tmp_path / "m", num_hidden_layers=6)
    want = prompt_logits(runner_of(open_checkpoint(str(model)), "none"), range(40))
    prepared = prepared_of(model, tmp_path / "out", codec="int8-g64")
    first, again = streamed_logits(prepared, [range(40), range(40)])
    assert torch.equal(first, again)
    assert not torch.equal(first, want)
    assert torch.cosine_similarity(first, want).min() > 0.99


TEXTS = ["Hello, world", "naïve café\n\t世界 🎉", "<|start|>user", "<|im_start|>user\nhi<|im_end|>  12345", ""]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "kind", ["folder", "folder without a template", "folder of a gguf", "gguf", "smollm2", "random"]
)
def test_a_prepared_folder_is_a_complete_model(tmp_path: Path, smollm2_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if kind in ("gguf", "folder of a gguf"):
        file = make_tiny_gguf(source / "m.gguf")
        name = str(file if kind == "gguf" else source)
    elif kind == "smollm2":
        name = str(shutil.copy(smollm2_path, source / "smollm2.gguf"))
    elif kind == "random":
        make_tiny(source)
        name = f"random:{source / 'config.json'}"
    else:
        name = str(make_tiny(source, chat=kind == "folder"))
    if kind.startswith("folder"):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 259], "temperature": 0.5}))
    checkpoint = open_checkpoint(name)
    before = checkpoint.tokenizer()
    ids = [before.encode(text) for text in TEXTS]
    prepare(checkpoint, tmp_path / "out", PrepareOptions(dtype="bfloat16"))
    shutil.rmtree(source)
    opened = open_checkpoint(str(tmp_path / "out"))
    assert opened.name == checkpoint.name
    assert opened.location == str(tmp_path / "out")
    assert opened.config == replace(checkpoint.config, dtype="bfloat16")
    after = opened.tokenizer()
    assert [after.encode(text) for text in TEXTS] == ids
    assert [after.encode(text, add_special_tokens=False) for text in TEXTS] == [
        before.encode(text, add_special_tokens=False) for text in TEXTS
    ]
    assert [after.decode(row) for row in ids] == [before.decode(row) for row in ids]
    assert (after.bos_token_id, after.eos_token_ids) == (before.bos_token_id, before.eos_token_ids)
    assert (after.vocab_size, after.chat_template) == (before.vocab_size, before.chat_template)
    if before.chat_template is not None:
        assert after.render_chat(MESSAGES) == before.render_chat(MESSAGES)
        assert after.encode_chat(MESSAGES) == before.encode_chat(MESSAGES)
    if kind.startswith("folder"):
        assert opened.generation["temperature"] == 0.5
    with pytest.raises(ModelError, match=r"`tightwire serve .*out --tp 1` serves it"):
        opened.reader()


def test_a_model_without_an_end_token_gets_none(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "m", eos_token_id=None)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    prepare(open_checkpoint(str(source)), tmp_path / "out", PrepareOptions())
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "m")
    for name in ("one", "two"):
        prepared_of(model, tmp_path / name, tp=2, codec="int8-g64")
    one, two = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


def test_progress_covers_writing_and_reading_back(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    prepare(
        open_checkpoint(str(make_tiny(tmp_path / "m"))),
        tmp_path / "out",
        PrepareOptions(tp=2),
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    made, verified = ([fraction for stage, fraction in seen if stage == name] for name in ("prepare", "verify"))
    assert seen == [("prepare", fraction) for fraction in made] + [("verify", fraction) for fraction in verified]
    for fractions in (made, verified):
        assert fractions == sorted(fractions) and fractions.count(1.0) == 1 and len(fractions) > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m")))
    pwrite, calls = os.pwrite, list[int]()

    def failing(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(code, os.strerror(code))
        return pwrite(fd, data[:5000], offset)  # a disk that is nearly full writes less than it is given

    monkeypatch.setattr(os, "pwrite", failing)
    words = "the disk is full; free some space" if code != errno.EIO else os.strerror(code)
    with pytest.raises(PrepareError, match=f"out: cannot be written, so nothing was kept: {words}"):
        prepare(checkpoint, tmp_path / "out", PrepareOptions(tp=2))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_bytes_that_read_back_differently_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m")))
    pwrite = os.pwrite

    def flipping(fd: int, data: memoryview, offset: int) -> int:
        written = bytearray(data)
        written[10] ^= 1
        return pwrite(fd, written, offset)

    monkeypatch.setattr(os, "pwrite", flipping)
    with pytest.raises(PrepareError, match=r"bytes read back differ .*rank-0-of-1\.weights: embedding, norm and head"):
        prepare(checkpoint, tmp_path / "out", PrepareOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_too_little_space_is_refused_before_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint("random:llama-3.2-1b")
    room = shutil.disk_usage(tmp_path)._replace(free=4096000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    with pytest.raises(ModelError, match=r"2\.3GiB are needed and 3\.9MiB are free; free 2\.3GiB"):
        prepare(checkpoint, tmp_path / "out", PrepareOptions(tp=2))
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_a_prepared_folder_and_no_other(tmp_path: Path) -> None:
    out = prepared_of(make_tiny(tmp_path / "m"), tmp_path / "out", tp=2).folder
    checkpoint, before = open_checkpoint(str(tmp_path / "m")), (out / MANIFEST).read_bytes()
    with pytest.raises(ModelError, match="is a prepared folder already; replace it with --force"):
        prepare(checkpoint, out, PrepareOptions())
    with pytest.raises(ModelError, match="exists and is not a prepared folder"):
        prepare(checkpoint, tmp_path / "m", PrepareOptions(), force=True)
    with pytest.raises(ValueError, match="cannot split 4 query heads over 5 ranks"):
        prepare(checkpoint, out, PrepareOptions(tp=5), force=True)
    assert (out / MANIFEST).read_bytes() == before
    prepare(checkpoint, out, PrepareOptions(tp=1), force=True)
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None and prepared.tp == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_packed_rows_that_no_split_can_cut_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", head_dim=8)))
    with pytest.raises(ValueError, match=r"cannot split .*o_proj\.weight in Q8_0 over 4 ranks"):
        prepare(checkpoint, tmp_path / "out", PrepareOptions(tp=4, quantization="int8"))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
