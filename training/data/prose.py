"""English prose of the benches and the training examples; ``english/ORIGIN.md`` lists sources and licences."""

from functools import cache
from pathlib import Path

ENGLISH_NAME = "English prose of the project (Austen, Twain, Newton, the Jargon File)"
ENGLISH_FOLDER = Path(__file__).parent / "english"
_PIECES = ("emma", "jargon", "opticks", "tom_sawyer")


def example_file(kind: str) -> tuple[Path, ...]:
    """240 sentences about persons; ``chats``: with the facts as JSON, ``preferences``: and a worse answer, ``prompts``: the facts alone."""
    return (Path(__file__).parent / "examples" / f"{kind}.jsonl",)


def english_files() -> tuple[Path, ...]:
    """Four UTF-8 files of paragraphs that blank lines separate."""
    return tuple(ENGLISH_FOLDER / f"{piece}.txt" for piece in _PIECES)


@cache
def english_text() -> str:
    """330 000 characters, about 77 000 tokens of SmolLM2's tokenizer."""
    return "\n".join(path.read_text(encoding="utf-8") for path in english_files())
