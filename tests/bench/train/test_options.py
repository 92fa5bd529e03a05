"""The command line of ``bench train``."""

import pytest

from tightwire.bench import cli
from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.models import MODELS
from tightwire.bench.train.options import parse_options
from tightwire.bench.train.trainee import config_of_arm


def test_the_defaults_hold_the_engine_against_torch() -> None:
    options = parse_options([])

    assert options.links == ("50mbit", "200mbit", "1gbit")
    assert {"zero3", "zero++", "dgc", "ddp", "fsdp2"} <= set(options.arms)
    assert options.world_size == 4


def test_quick_gives_way_to_what_is_given() -> None:
    options = parse_options(["--quick", "--arms", "none,ddp"])

    assert (options.links, options.arms, options.repeats) == (("200mbit",), ("none", "ddp"), 2)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if not ARMS[arm].peer])
def test_every_arm_is_a_configuration_that_training_takes(arm: str) -> None:
    config, options = config_of_arm(parse_options(["--arms", arm, "--model", "tiny"]), ARMS[arm])

    assert options.sharding.name == config.parallel.sharding
    assert config.batch.accumulation(4) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--arms", "zero3,zero4"], "--arms: there is no 'zero4'; choose of none, zero1"),
        (["--nodes", "1"], "--nodes must be at least 2, got 1"),
        (["--links", "latency=1ms"], "--links: latency=1ms limits no rate"),
        (["--links", "fast"], "'fast' is not a link"),
        (["--nodes", "33"], "more than 64 ranks"),
        (["--dtype", "bfloat16"], "--dtype bfloat16: ddp computes in float32 only"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--label", "a/b"], "--label begins the names of files"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_options(argv)

    assert left.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_verb_is_known_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])

    shown = capsys.readouterr().out
    assert all(name in shown for name in MODELS)
