"""``tightwire bench lab code``: the share of HumanEval's problems that a server's greedy answers solve, by AllReduce.

Each problem is the beginning of a Python function; its tests decide. Source: Chen et al., arXiv 2107.03374.
"""

import asyncio
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tightwire.bench.client import ask
from tightwire.bench.lab.code.options import OWN, CodeOptions
from tightwire.bench.quality.items import accuracy
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench
from tightwire.remote import Remote, RemoteError, connect

_TIMEOUT_S = 900.0
_RUN_S, _RUN_BYTES = 10, 1 << 30
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    prompt: str  # imports, a signature and its docstring
    test: str  # defines ``check``
    entry_point: str


class CodeBench(Bench[CodeOptions]):
    verb = "code"
    of_lab = True
    metrics = (Metric(name="solved", worse_is_higher=False, better="better", worse="worse"),)
    columns = (
        Column("AllReduce", "name"),
        Column("problems", "problems", "d"),
        Column("solved, %", "solved", ".1f", 100),
        Column("95 % +-", "margin", ".1f", 100),
        Column("as the first, %", "agreement", ".1f", 100),
        Column("tokens", "tokens", "d"),
    )
    failures = ((RemoteError, 1), (ValueError, 2))

    def measure(self) -> None:
        problems = read_problems(Path(self.options.problems))[: self.options.first]
        remote = connect(self.options.url, api_key=self.options.api_key)
        with self.progress:
            asyncio.run(self._measure(remote, problems))
        self.keep()
        self.print_table(Table(title="HumanEval, greedy answers", columns=self.columns, rows=self.measured))

    async def _measure(self, remote: Remote, problems: list[Problem]) -> None:
        async with httpx.AsyncClient(headers=dict(remote.headers), timeout=_TIMEOUT_S, trust_env=False) as http:
            for name in self.options.allreduce:
                task = self.progress.add_task(name, total=len(problems))
                slots = asyncio.Semaphore(self.options.concurrency)

                async def solve(problem: Problem, name: str = name, task: Any = task, slots: Any = slots) -> _Answer:
                    async with slots:
                        answer = await _ask(http, remote, self.options, problem, name)
                        answer.solved = await asyncio.to_thread(run_program, program_of(problem, answer.text))
                    self.progress.advance(task)
                    return answer

                self._note(name, problems, await asyncio.gather(*map(solve, problems)))
                self.keep()

    def _note(self, name: str, problems: list[Problem], answers: "list[_Answer]") -> None:
        solved, margin = accuracy([answer.solved for answer in answers])
        first = self.measured[0]["answers"] if self.measured else [answer.text for answer in answers]
        self.measured.append(
            {
                "name": name,
                "problems": len(problems),
                "solved": solved,
                "margin": margin,
                "samples": {"solved": [float(answer.solved) for answer in answers]},
                "agreement": sum(a.text == text for a, text in zip(answers, first, strict=True)) / len(answers),
                "tokens": sum(answer.num_tokens for answer in answers),
                "solved_names": [p.name for p, answer in zip(problems, answers, strict=True) if answer.solved],
                "answers": [answer.text for answer in answers],
            }
        )


@dataclass(slots=True)
class _Answer:
    text: str
    num_tokens: int
    solved: bool = False


def read_problems(path: Path) -> list[Problem]:
    """The problems of HumanEval.jsonl, packed or not. ValueError: no such file, or other contents."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
        found = [Problem(row["task_id"], row["prompt"], row["test"], row["entry_point"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"--problems {path}: is not HumanEval's file: {error!r}") from None
    if not found:
        raise ValueError(f"--problems {path}: has no problem")
    return found


async def _ask(http: httpx.AsyncClient, remote: Remote, options: CodeOptions, problem: Problem, name: str) -> _Answer:
    own: Mapping[str, Any] = {} if name == OWN else {"tightwire": {"allreduce": name}}
    request = "Complete this Python function. Answer with the whole function in one code block.\n\n"
    body = {
        "model": remote.model,
        "messages": [{"role": "user", "content": f"{request}```python\n{problem.prompt}```"}],
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "cache_salt": name,  # keys that one AllReduce made are not used by another
        **own,
    }
    answer = await ask(http, f"{remote.base}/chat/completions", body)
    return _Answer(answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"])


def program_of(problem: Problem, answer: str) -> str:
    """A program that ends without an error if the answer solves the problem.

    An answer with the function stands behind what the prompt has above it, any other behind the whole prompt.
    """
    found = _FENCE.search(answer)
    code = found[1] if found else answer
    head, signature = f"def {problem.entry_point}", re.compile(rf"^def {problem.entry_point}\b", re.MULTILINE)
    before = problem.prompt.rpartition(head)[0] if signature.search(code) else problem.prompt
    return f"{before}\n{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def run_program(program: str) -> bool:
    """Return True if the program ends without an error, within its limits of time and memory."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_RUN_S,
                check=False,
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_RUN_BYTES, _RUN_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_RUN_S, _RUN_S))
