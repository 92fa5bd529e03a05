"""Stop strings in streamed text: found across token boundaries, holding back only what could become one."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of ``stops`` is complete; the first to be completed wins, the longest of equals.

    The outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.hit: str | None = None  # the stop string found; the text ends there

    def push(self, text: str) -> str:
        """The part of the text so far that is certainly wanted and was not given before."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
