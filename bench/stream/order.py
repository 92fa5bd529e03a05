"""Checks the order in which a pool of buffers was used: the conditions C1, C2 and C3 of ``buffers``."""

from collections.abc import Iterable

from tightwire.buffers import BufferConflictError, BufferEvent

_BEFORE = {  # the allowed previous events of a buffer; that of "fill" depends on whether the pool saves
    "filled": ("fill",),
    "use": ("filled", "keep"),
    "keep": ("use",),
    "release": ("use",),
    "save": ("release",),
    "saved": ("save",),
}


class OrderCheck:
    """Checks C1, C2 and C3 in a trace that begins with free buffers; the trace may come in parts. ``saves``: as for the pool."""

    def __init__(self, *, saves: bool = False) -> None:
        self._end = "saved" if saves else "release"
        self._before = {**_BEFORE, "fill": (self._end,)}
        self._inside: dict[int, tuple[int, str]] = {}  # by buffer: the owner and its last event

    def check(self, events: Iterable[BufferEvent]) -> None:
        """Check the next part; raise BufferConflictError with the condition that does not hold, and end there."""
        for event in events:
            if event.kind == "ask":
                continue
            piece, number = event.owner, event.buffer
            owner, last = self._inside.get(number, (piece, self._end))
            if event.kind == "fill" and last != self._end:
                raise BufferConflictError(f"C2: buffer {number} was filled for {piece} after {last!r} of {owner}")
            for buffer, (other, kind) in self._inside.items():
                if event.kind == "fill" and buffer != number and other == piece and kind != self._end:
                    raise BufferConflictError(
                        f"C3: buffer {number} was filled for {piece} after its {kind!r} in buffer {buffer}"
                    )
            if last not in self._before[event.kind] or (event.kind != "fill" and owner != piece):
                raise BufferConflictError(f"C1: {event.kind!r} of {piece} in buffer {number} after {last!r} of {owner}")
            self._inside[number] = (piece, event.kind)
