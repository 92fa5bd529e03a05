import pytest

from tightwire.bench.report.environment import describe_environment


@pytest.mark.parametrize(
    "argv",
    [["--api-key", "sesame"], ["--api-key=sesame"], ["--url", "http://me:sesame@host"]],
)
def test_secrets_of_the_command_line_are_not_kept(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tightwire", *argv, "--label", "open"])

    command = describe_environment()["command"]

    assert "sesame" not in " ".join(command) and "***" in " ".join(command)
    assert command[-2:] == ["--label", "open"]


@pytest.mark.parametrize("program", ["/opt/somewhere/bin/tightwire", "/opt/somewhere/tightwire/__main__.py"])
def test_the_installation_folder_is_not_kept(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program, "bench"])
    assert describe_environment()["command"] == ["tightwire", "bench"]
