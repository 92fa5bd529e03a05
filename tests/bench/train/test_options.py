"""The command line of ``bench train``."""

import pytest

from tightwire.bench import cli
from tightwire.bench.train.measure import config_of_arm
from tightwire.bench.train.options import ARMS, MODELS, TrainOptions


def parse(*argv: str) -> TrainOptions:
    return TrainOptions.from_argv(argv, verb="train")


def test_the_defaults_compare_the_engine_with_torch() -> None:
    options = parse()

    assert options.links == ("50mbit", "200mbit", "1gbit")
    assert {"zero3", "zero++", "dgc", "ddp", "fsdp2"} <= set(options.arms)
    assert options.world_size == 4 and options.sequences == (4,)
    assert parse("--sequences", "1,2,16").sequences == (1, 2, 16)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if not ARMS[arm].peer])
def test_every_arm_is_a_valid_training_configuration(arm: str) -> None:
    config, options = config_of_arm(parse("--arms", arm, "--model", "tiny"), arm)

    assert options.sharding.name == config.parallel.sharding
    assert config.batch.accumulation(4) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--arms", "zero3,zero4"], "--arms must be among none, zero1, zero2"),
        (["--ranks-per-node", "99"], "--nodes must be 64 / --ranks-per-node 99 or less, got 2"),
        (["--nodes", "1"], "--nodes: must be at least 2, got 1"),
        (["--links", "latency=1ms"], "--links: latency=1ms limits no rate"),
        (["--links", "fast"], "--links: 'fast' is not a link"),
        (["--model", "11m"], "--model: none of tiny, 10m, 30m, 12m-untied, 60m, and no such model: '11m'"),
        (["--dtype", "bfloat16"], "--dtype bfloat16: ddp computes in float32 only"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--label", "a/b"], "--label begins the names of files"),
    ],
)
def test_invalid_options_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(*argv)

    assert left.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_help_names_all_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])

    shown = capsys.readouterr().out
    assert all(name in shown for name in MODELS)
