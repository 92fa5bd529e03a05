"""`tightwire pull`: the path it prints, and unknown names."""

from pathlib import Path

import pytest

from tightwire.model.checkpoint.catalog import is_cached
from tightwire.model.checkpoint.catalog import pull as fetch
from tightwire.server.cli.pull import pull


def test_pull_prints_where_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not is_cached("smollm2-135m"):
        pytest.skip("the model is not in the cache; `tightwire pull` fetches it")
    assert pull([]) == 0
    assert capsys.readouterr().out.strip() == str(fetch())


def test_pull_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        pull(["llama-9"])
    assert exit.value.code == 2
    assert "smollm2-135m" in capsys.readouterr().err
