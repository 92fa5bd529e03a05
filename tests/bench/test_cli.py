import pytest

from tightwire.bench.cli import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])

    assert caught.value.code == 0
    assert f"tightwire bench {verb}" in capsys.readouterr().out


def test_an_unknown_bench_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swim"]) == 2
    assert "unknown bench 'swim'; choose one of answers, comm, compare, kernels" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
