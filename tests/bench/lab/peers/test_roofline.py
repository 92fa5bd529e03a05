import json
import timeit
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from tightwire.bench import cli
from tightwire.bench.lab.peers import roofline
from tightwire.bench.lab.peers.options import RooflineOptions
from tightwire.bench.lab.peers.roofline import bytes_of_token, summarize
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint


@pytest.mark.parametrize(("argv", "peer"), [([], True), (["--no-peer"], False)])
def test_transformers_can_be_left_out(argv: list[str], peer: bool) -> None:
    assert RooflineOptions.from_argv(argv, verb="roofline").peer is peer


def test_shares_are_of_the_rates_of_the_device() -> None:
    config = open_checkpoint("random:llama-3.2-1b").config
    elems = config.num_layers * config.layer_matrix_elems
    weight_bytes = 2 * (elems + config.vocab_size * config.hidden_size)
    loads = {
        "one": {"tpot_s": {"p50": 2.0}},
        "prompt": {"prompt_tokens": 3, "succeeded": 3, "ttft_s": {"p50": 4.0}},
        "crowd": {"concurrency": 8, "output_tokens_per_s": 9.0},
    }

    rates = {"copy_bytes_per_s": float(weight_bytes), "product_flops": 2.0 * elems}
    token, prompt, crowd = summarize(config, rates, loads, weight_bytes)

    assert (token["share"], crowd["tokens_per_s"]) == (0.5, 9.0)
    assert prompt["share"] == pytest.approx(0.25, rel=1e-3)  # attention to one token adds little


def test_a_gpu_has_its_clock_when_its_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rises under load, here in the time of 40 copies."""
    now_s = [0.0]
    monkeypatch.setattr(timeit, "repeat", partial(timeit.repeat, timer=lambda: now_s[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now_s.__setitem__(0, now_s[0] + (2 if now_s[0] < 80 else 1)))
    assert roofline._least_s(lambda: None, "cuda") == 1


def test_a_token_reads_each_weight_once_but_not_an_embedding_table_of_its_own(tmp_path: Path) -> None:
    for tied in (True, False):
        checkpoint = open_checkpoint(str(make_tiny(tmp_path / str(tied), tie_word_embeddings=tied)))
        config = checkpoint.config
        products = config.num_layers * config.layer_matrix_elems + config.vocab_size * config.hidden_size
        norms = (2 * config.num_layers + 1) * config.hidden_size
        assert bytes_of_token(checkpoint, "none") == 2 * (products + norms)
        assert bytes_of_token(checkpoint, "int4") < bytes_of_token(checkpoint, "none") / 2


def test_the_parts_of_a_step_are_those_of_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "m", num_key_value_heads=2, intermediate_size=128)
    config, prompt_len = open_checkpoint(str(model)).config, 32

    argv = [str(model), "--tp", "2", "--device", "cpu", "--prompt-len", str(prompt_len), "--crowd", "3"]
    assert cli.main(["lab", "roofline", *argv, "--no-server", "--no-peer"]) == 0

    cells = {cell["name"]: cell for cell in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]}
    prompt = {
        name.removeprefix("a prompt of 32: "): cell for name, cell in cells.items() if name.startswith("a prompt")
    }
    assert set(prompt) == {
        *(
            "embedding",
            "products",
            "attention",
            "norm",
            "rope, cache write",
            "gate, up, SwiGLU",
            "sums over ranks",
            "logits",
        ),
        *("sampling", "sum of the parts", "whole step, as served"),
    }
    elems = config.num_layers * config.layer_matrix_elems
    last_mlp = (prompt_len - 1) * 3 * config.hidden_size * config.mlp_size  # computed for the last row alone
    multiplied = ("products", "gate, up, SwiGLU")
    assert sum(prompt[name]["flops"] for name in multiplied) == 2 * (prompt_len * elems - last_mlp) // 2  # of one rank
    num_columns = len(make_layout(config, 2).shards[0].vocab_rows)
    assert prompt["logits"]["flops"] == 2 * num_columns * config.hidden_size  # of the last token
    assert prompt["sums over ranks"]["calls"] == 2 * config.num_layers
    assert sum(cells[f"3 tokens at once: {name}"]["flops"] for name in multiplied) == 2 * 3 * elems // 2
    assert cells["a generated token: whole step, as served"]["seconds"] > 0
