"""The text as the model gets it: windows of equal length, spread evenly over the whole text, that do not overlap."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """``token_ids_NL``: N windows, each begins with what the tokenizer puts before a text, ``num_first`` tokens.

    ``calibration`` and ``judged`` number the windows for choosing a mix and for all that is reported; none is in both.
    """

    token_ids_NL: Tensor
    num_first: int
    text_tokens: int  # of the whole text
    calibration: tuple[int, ...]
    judged: tuple[int, ...]

    @property
    def num_scored(self) -> int:
        """Rows of a window whose next token is text."""
        return self.token_ids_NL.shape[1] - max(1, self.num_first)

    def scored(self, hidden_BLD: Tensor) -> Tensor:
        """(T, D): the rows whose next token is text."""
        return hidden_BLD[:, max(0, self.num_first - 1) : -1].flatten(0, 1)

    def next_ids(self, numbers: Sequence[int]) -> Tensor:
        """(T,): what came after each of ``scored``."""
        return self.token_ids_NL[list(numbers), max(1, self.num_first) :].flatten()


def make_windows(tokenizer: Tokenizer, text: str, *, num_tokens: int, window: int, num_calibration: int = 0) -> Windows:
    """Windows of ``window`` tokens, ``num_tokens`` in all to judge by (rounded up to windows), and some to calibrate with.

    Raises:
        ValueError: the text is too short; says how long it is.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = tokenizer.encode("")
    length = window - len(first)
    num_judged = -(-num_tokens // window)
    num_windows = num_judged + num_calibration
    if length < 2 or num_windows * length > len(ids):
        most = max(0, len(ids) // max(1, length) - num_calibration) * window
        ask = f"or ask for at most --tokens {most}" if most else "or ask for smaller --window and --tokens"
        found_with = f" ({num_calibration} of them for the search)" if num_calibration else ""
        raise ValueError(
            f"the text has {len(ids)} tokens, and {num_windows} windows of {window}{found_with} need "
            f"{num_windows * length}; give a longer --text, {ask}"
        )
    # Of the places that windows could take in a row, those that spread over the text.
    places = len(ids) // length
    starts = [number * places // num_windows * length for number in range(num_windows)]
    token_ids_NL = torch.tensor([[*first, *ids[start : start + length]] for start in starts])
    calibration = tuple((2 * number + 1) * num_windows // (2 * num_calibration) for number in range(num_calibration))
    return Windows(
        token_ids_NL=token_ids_NL,
        num_first=len(first),
        text_tokens=len(ids),
        calibration=calibration,
        judged=tuple(number for number in range(num_windows) if number not in calibration),
    )
