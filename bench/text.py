"""Words, passages and the user's own file for the benches; ``model.text.prose`` has the English prose. Callers tokenize it."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tightwire.model.text.prose import ENGLISH_FOLDER


@cache
def english_words() -> tuple[str, ...]:
    """More than 500 plain words, each one token in byte-level BPE vocabularies, at the start of a text and after a space.

    A prompt of n of them is n tokens long without asking a tokenizer. Checked against SmolLM2's vocabulary by
    ``tests/bench/serve/test_workload.py``; other vocabularies split a few of them, so the bench calibrates against the
    server's own count.
    """
    return tuple((ENGLISH_FOLDER / "words.txt").read_text(encoding="utf-8").split())


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); "
            "convert it, for example with `iconv -t UTF-8`"
        ) from None


class Passages:
    """Passages of one tokenized text. No two begin at the same token, so none repeats the prefix of another."""

    def __init__(self, token_ids: Sequence[int], *, seed: int = 0) -> None:
        self._token_ids = list(token_ids)
        self._starts = list(range(len(self._token_ids)))
        random.Random(seed).shuffle(self._starts)

    def take(self, num_tokens: int) -> list[int]:
        """``num_tokens`` consecutive ids from a start that was not used before.

        Raises:
            ValueError: the text has no such start left.
        """
        last_start = len(self._token_ids) - num_tokens
        for index, start in enumerate(self._starts):
            if start <= last_start:
                del self._starts[index]
                return self._token_ids[start : start + num_tokens]
        raise ValueError(
            f"the text has {len(self._token_ids)} tokens and no unused start left for a passage of {num_tokens}; "
            "give a longer text"
        )
