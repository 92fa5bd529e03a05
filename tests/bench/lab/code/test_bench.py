"""Programs made of answers, their limits, and a bench against a scripted server."""

import gzip
import json
from pathlib import Path

import pytest

from tightwire.bench.cli import main
from tightwire.bench.lab.code.bench import Problem, program_of, read_problems, run_program
from tightwire.bench.lab.code.options import CodeOptions

ADD = Problem(
    "HumanEval/0",
    'import math\n\n\ndef add(a, b):\n    """Add two numbers."""\n',
    "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "add",
)


@pytest.mark.parametrize(
    ("answer", "solved"),
    [
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", True),
        ("```\ndef helper(x):\n    return x\n\ndef add(a, b):\n    return int(math.fsum((a, helper(b))))\n```", True),
        ("    return a + b", True),  # goes on with the prompt
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```python\ndef add(a, b):\n    return a + b", True),  # cut off behind the function
        ("I cannot do that.", False),
        ("```python\ndef add(a, b):\n    while True: pass\n```", False),
        ("```python\ndef add(a, b):\n    return len(bytearray(2 << 30)) and 3\n```", False),
    ],
)
def test_an_answer_is_solved_if_its_program_passes_the_tests(
    answer: str, solved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightwire.bench.lab.code.bench._RUN_S", 2)
    assert run_program(program_of(ADD, answer)) is solved


def test_problems_are_read_packed_or_not(tmp_path: Path) -> None:
    row = {"task_id": ADD.name, "prompt": ADD.prompt, "test": ADD.test, "entry_point": "add", "canonical_solution": ""}
    (tmp_path / "h.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress((tmp_path / "h.jsonl").read_bytes()))
    assert read_problems(tmp_path / "h.jsonl") == read_problems(tmp_path / "h.jsonl.gz") == [ADD]


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", b"\xff"])
def test_another_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    for name in ("h.jsonl", "h.jsonl.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"--problems .*{name}: "):
            read_problems(tmp_path / name)


def test_programs_are_run_only_if_the_user_agrees() -> None:
    with pytest.raises(ValueError, match="--run-code"):
        CodeOptions(problems="h.jsonl")
    with pytest.raises(ValueError, match="--problems FILE is missing"):
        CodeOptions(run_code=True)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "code", "--problems", str(tmp_path / "none.jsonl"), "--run-code"]) == 2
    assert "none.jsonl: is not HumanEval's file: FileNotFoundError" in capsys.readouterr().err
