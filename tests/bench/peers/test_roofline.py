import pytest

from tightwire.bench.options import parse_options
from tightwire.bench.peers.roofline import RooflineOptions, summarize
from tightwire.model.open import open_checkpoint


@pytest.mark.parametrize(("argv", "peer"), [([], True), (["--no-peer"], False)])
def test_transformers_can_be_left_out(argv: list[str], peer: bool) -> None:
    assert parse_options(RooflineOptions, argv, verb="roofline", description="").peer is peer


def test_shares_are_of_the_rates_of_the_device() -> None:
    config = open_checkpoint("random:llama-3.2-1b").config
    elems = config.num_layers * config.layer_matrix_elems
    weight_bytes = 2 * (elems + config.vocab_size * config.hidden_size)
    loads = {
        "one": {"tpot_s": {"p50": 2.0}},
        "prompt": {"prompt_tokens": 3, "succeeded": 3, "ttft_s": {"p50": 4.0}},
        "crowd": {"concurrency": 8, "output_tokens_per_s": 9.0},
    }

    token, prompt, crowd = summarize(config, {"copy_bytes_per_s": weight_bytes, "product_flops": 2.0 * elems}, loads)

    assert (token["share"], crowd["tokens_per_s"]) == (0.5, 9.0)
    assert prompt["share"] == pytest.approx(0.25, rel=1e-3)  # attention to one token adds little
