"""Passages of a tokenized text, and the user's own text, for the benches."""

import random
from collections.abc import Sequence
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file; raises ValueError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None


class Passages:
    """Passages of one tokenized text. No two begin at the same token, so none repeats the prefix of another."""

    def __init__(self, token_ids: Sequence[int], *, seed: int = 0) -> None:
        self._token_ids = list(token_ids)
        self._starts = random.Random(seed).sample(range(len(self._token_ids)), len(self._token_ids))

    def take(self, num_tokens: int) -> list[int]:
        """``num_tokens`` consecutive ids from a start that was not used before; raises ValueError if there is none left."""
        for start in self._starts:
            if start + num_tokens <= len(self._token_ids):
                self._starts.remove(start)
                return self._token_ids[start : start + num_tokens]
        raise ValueError(
            f"the text has {len(self._token_ids)} tokens and no unused start left for a passage of {num_tokens}; "
            "give a longer text"
        )
