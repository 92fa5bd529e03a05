"""``tune --quality`` on a tiny model: what it measures is what ``explain`` and a KL budget use."""

from pathlib import Path

import pytest
from tiny import make_tiny

from tightwire.__main__ import main


def test_explain_uses_the_figures_of_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [str(make_tiny(tmp_path / "tiny")), "--tp", "2", "--device", "cpu"]
    named = ["--allreduce", "flash-int4-plain"]
    assert main(["explain", *flags, *named]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    command = f"tightwire tune --quality {' '.join(flags[:3])} --allreduce flash-int4-plain"
    assert command.replace(" ", "") in shown.replace(" ", "")

    assert main(["tune", "--quality", *flags, *named, "--tokens", "100"]) == 0
    shown = capsys.readouterr().out
    assert "tiny with 2 ranks" in shown and "written to" in shown
    for name in ("flash-int8", "flash-int3", "flash-int4-plain"):
        assert name in shown

    assert main(["explain", *flags, *named]) == 0
    assert "measured on this model with 2 ranks" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="2"):
        main(["tune", *flags, "--tokens", "5"])
    assert "--tokens is for --quality" in capsys.readouterr().err
    assert main(["tune", "--quality", str(tmp_path / "none")]) == 2
