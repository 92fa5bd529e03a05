"""English prose of the benches and the training examples; ``english/ORIGIN.md`` lists sources and licences."""

from functools import cache
from pathlib import Path

ENGLISH_NAME = "English prose of the project (Austen, Twain, Newton, the Jargon File)"
ENGLISH_FOLDER = Path(__file__).parent / "english"
_PIECES = ("emma", "jargon", "opticks", "tom_sawyer")


def example_chats() -> tuple[Path, ...]:
    """240 chats of the project: a sentence about a person, and its facts as JSON."""
    return (Path(__file__).parent / "examples" / "chats.jsonl",)


def example_preferences() -> tuple[Path, ...]:
    """240 such sentences with that answer and a worse one."""
    return (Path(__file__).parent / "examples" / "preferences.jsonl",)


def example_prompts() -> tuple[Path, ...]:
    """240 such sentences, with the facts that an answer should have."""
    return (Path(__file__).parent / "examples" / "prompts.jsonl",)


def english_files() -> tuple[Path, ...]:
    """Four UTF-8 files of paragraphs that blank lines separate."""
    return tuple(ENGLISH_FOLDER / f"{piece}.txt" for piece in _PIECES)


@cache
def english_text() -> str:
    """330 000 characters, about 77 000 tokens of SmolLM2's tokenizer."""
    return "\n".join(path.read_text(encoding="utf-8") for path in english_files())
