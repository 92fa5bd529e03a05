"""Every command in the fenced and indented blocks of README, CONTRIBUTING and docs/ is one that the programs accept.

What "run" means here: ``tightwire`` lines go through the parser of their verb, which checks names, values and how options fit, and
nothing is started or measured (``train`` with --dry-run; `my.yaml` stands for an example); ``make`` lines are expanded by ``make -n``; the paths of pytest lines must exist; the body of a curl
line is answered by the application over a scripted engine, which has one model and one AllReduce, whatever the line names. The examples of Python in README and examples/ run in ``servers/``. A
block of other commands stands behind ``<!-- not run: REASON -->``.

Commands of figures (bench/RESULTS.md) that start the program are parsed too, with a value for what they leave open; others there are not looked at.
"""

import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from helpers.parsed_commands import parse
from helpers.server.fake_engine import FakeEngine, app_for, client_of

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCED = re.compile(r"((?:<!--[^\n]*-->\n)?)```sh\n(.*?)```", re.DOTALL)
_INDENTED = re.compile(r"((?:<!--[^\n]*-->\n\n?)?)((?:^ {4}[^\n]*\n)+)", re.MULTILINE)
_FIRST_WORDS = (
    "for",
    "tightwire",
    "make",
    "curl",
    "sudo",
    "ip",
    "docker",
    "helm",
    "kubectl",
    "python",
    "torchrun",
    ".venv/bin/python",
    "pip",
)
_NOT_RUN = re.compile(r"<!-- not run: .{10,} -->")


class Command(NamedTuple):
    page: str
    text: str


def _commands(page: Path) -> Iterator[Command]:
    text = page.read_text()
    blocks = [found.groups() for found in _FENCED.finditer(text)]
    indented = [found.groups() for found in _INDENTED.finditer(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]
    blocks += [(mark, block) for mark, block in indented if block.split()[0] in _FIRST_WORDS]
    for mark, block in blocks:
        if not _NOT_RUN.match(mark):
            for line in block.replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    yield Command(page.relative_to(ROOT).as_posix(), " ".join(line.split()))


# One that stands on several pages is run as the first one's.
COMMANDS = list({command.text: command for page in reversed(PAGES) for command in _commands(page)}.values())


def _expand(words: list[str]) -> None:
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_workflows_call_targets_that_exist() -> None:
    called = [
        shlex.split(command.replace("${{ matrix.triton }}", "3.6.0"))
        for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
        for command in re.findall(r"run: (make .*)", path.read_text())
    ]
    assert ["make", "aot", "TRITON=3.6.0"] in called
    for words in called:
        _expand(words)


async def _post(words: list[str]) -> httpx.Response:
    url = next(word for word in words if "localhost" in word or "127.0.0.1" in word)
    body = {**json.loads(words[words.index("-d") + 1]), "model": "tiny"}
    if "tightwire" in body:
        body["tightwire"]["allreduce"] = "native"
    async with client_of(app_for(FakeEngine())) as client:
        return await client.post(url[url.index("/v1") :], json=body)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
async def test_a_command_is_accepted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command.text, comments=True)
    words = words[1:] if words[0] == "sudo" else words
    match words:
        case ["tightwire", *argv]:
            parse(monkeypatch, ["smollm2-135m" if word.startswith("runs/") else word for word in argv])  # made by a run
        case ["torchrun", *_]:
            parse(monkeypatch, words[words.index("tightwire") + 1 :])
        case ["make", *_]:
            _expand(words)
        case [".venv/bin/python", "-m", "pytest", *rest]:
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests"))
        case ["python", path, *_] if path.startswith("examples/"):
            assert (ROOT / path).is_file()
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["curl", *_]:
            response = await _post(words)
            assert response.status_code == 200, response.text
        case _:
            pytest.fail(f"{command.page}: nothing runs this; put <!-- not run: REASON --> before its block")


_RESULTS = ROOT / "bench" / "RESULTS.md"
# What commands of figures leave open: a value that fits, or nothing.
_OPEN = {
    "N": "2",
    "NAME": "two-shot",
    "TYPE": "int8",
    "RATE": "200mbit",
    "LATENCY": "1ms",
    "LAYOUT": "tensor",
    "KIND": "suffix",
    "FILE": "smollm2-135m",
}
_OPEN |= {"S": "0", "KEY=VALUE": "", "ARM": ""}
_OPEN_WORD = re.compile(r"\b[A-Z]+(=VALUE)?\b")


def _of_results() -> list[str]:
    """The commands in blocks and sentences that begin with the program, with sudo or torchrun before it or not."""
    blocks = [part.strip() for command in _commands(_RESULTS) for part in command.text.split(";")]
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`", _RESULTS.read_text())]
    started = re.compile(r"(sudo )?tightwire (bench|serve|train) |torchrun .*-m tightwire train ")
    elsewhere = {command.text for command in COMMANDS}
    return [text for text in dict.fromkeys([*blocks, *spans]) if started.match(text) and text not in elsewhere]


_OPTIONAL, _EITHER = re.compile(r" \[(-.*?)\](?= |$)"), re.compile(r"^([\w.,-]+)((?:\|[\w.,-]+)+)$")


def _filled(text: str) -> list[list[str]]:
    """The words of a command with a value where it leaves one open: without what is in brackets and with it, and with each alternative."""
    text = text.replace("KIND --draft-model", "draft --draft-model")
    text = re.sub(r"model\.start=[\w/-]+", "model.start=smollm2-135m", text)
    text = re.sub(r"\.\.\.,|'data.files=.*?'", "", text)
    whole = text
    while _OPTIONAL.search(whole):
        whole = _OPTIONAL.sub(r" \1", whole)
    return [words for each in dict.fromkeys([_OPTIONAL.sub("", text), whole]) for words in _alternatives(each)]


def _alternatives(text: str) -> Iterator[list[str]]:
    words = [
        _OPEN_WORD.sub(lambda found: _OPEN.get(found[0], found[0]), word) for word in shlex.split(text, comments=True)
    ]
    if words[0] == "torchrun":
        words.append(f"dry_run.ranks={words[words.index('--nproc-per-node') + 1]}")
    choices = [
        word.split("|") if _EITHER.match(word) else [word] for word in words[words.index("tightwire") + 1 :] if word
    ]
    for number in range(max(map(len, choices))):
        yield [choice[min(number, len(choice) - 1)] for choice in choices]


@pytest.mark.parametrize("text", _of_results(), ids=lambda text: text[:70])
def test_a_command_of_a_figure_is_accepted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in _filled(text):
        with monkeypatch.context() as patched:
            parse(patched, words)


def test_blocks_are_found_and_marks_have_reasons() -> None:
    assert len(_of_results()) >= 60
    assert {"README.md", "CONTRIBUTING.md", "docs/training.md"} <= {command.page for command in COMMANDS}
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- not run.*?-->", page.read_text())]
    assert all(_NOT_RUN.fullmatch(mark) for mark in marks)
