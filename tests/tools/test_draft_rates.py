"""The rates of a server's answers have a row for each kind of prompt, and tell texts that differ apart."""

import gzip
import json
from pathlib import Path

import draft_rates
import pytest
from helpers.server.fake_openai import FakeServer, running


def _problems(folder: Path) -> str:
    path = folder / "problems.jsonl.gz"
    bodies = ["    return 1\n" * 60, "    return 2\n" * 3]  # of which only the first is written again
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"prompt": "def f():\n", "canonical_solution": each}) + "\n" for each in bodies)
    return str(path)


@pytest.mark.parametrize("at_once", [1, 4])
def test_each_kind_has_its_tokens_and_texts(at_once: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for answer in (["one ", "two ", "three "], ["one ", "two ", "four "]):
        server = FakeServer(answer=answer)
        with running(server):
            assert draft_rates.main([_problems(tmp_path), server.url, f"at_once={at_once}", "most=3"]) == 0
        rows.append([line.split() for line in capsys.readouterr().out.splitlines()])
        assert [(row[0], int(row[1])) for row in rows[-1]] == [("code", 4), ("hints", 2), ("chats", 10)]
        assert all(body["temperature"] == 0 and body["max_tokens"] == 3 for body in server.bodies)
    assert all(first[-1] != second[-1] for first, second in zip(*rows, strict=True))


def test_a_call_without_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert draft_rates.main(["problems.jsonl.gz"]) == 2 and "usage: " in capsys.readouterr().err
