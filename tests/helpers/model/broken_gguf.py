"""The tiny model's .gguf taken apart, so that a test can write it with a fault."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
from helpers.model.tiny_gguf import make_tiny_gguf

_ALIGNMENT = 32


@dataclass
class Entry:
    """A tensor as the header describes it. ``offset``: None for the place behind the tensor before it."""

    name: str
    dims: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Parts:
    """All that a .gguf is written from; ``keys`` hold a type and a value."""

    keys: list[tuple[str, bytes]]
    tensors: list[Entry]
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    behind: list[bytes] = field(default_factory=list)

    @classmethod
    def of_tiny(cls, path: Path) -> "Parts":
        reader = gguf.GGUFReader(make_tiny_gguf(path, "Q8_0", head_dim=32))
        keys = [
            (name, b"".join(part.tobytes() for part in each.parts[2:]))
            for name, each in reader.fields.items()
            if not name.startswith("GGUF.")
        ]
        tensors = [
            Entry(each.name, tuple(map(int, each.shape)), int(each.tensor_type), each.data.tobytes())
            for each in reader.tensors
        ]
        return cls(keys, tensors)

    def set(self, name: str, value: bytes | None) -> None:
        """Replace a key's type and value, add it, or remove it."""
        kept = [(own, old if own != name else value) for own, old in self.keys]
        if value is not None and all(own != name for own, _ in kept):
            kept.append((name, value))
        self.keys = [(own, new) for own, new in kept if new is not None]

    def tensor(self, name: str) -> Entry:
        return next(entry for entry in self.tensors if entry.name == name)

    def to_bytes(self) -> bytes:
        numbers = [
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.keys) if self.num_keys is None else self.num_keys,
        ]
        header = self.magic + struct.pack("<IQQ", self.version, *numbers)
        for name, value in self.keys:
            header += _text(name) + value
        data = b""
        for entry in self.tensors:
            header += _text(entry.name) + struct.pack(f"<I{len(entry.dims)}Q", len(entry.dims), *entry.dims)
            header += struct.pack("<IQ", entry.kind, len(data) if entry.offset is None else entry.offset)
            data += _padded(entry.data)
        return _padded(header) + data


def number(value: float, form: str = "I") -> bytes:
    """A key's type and value; ``form``: of struct."""
    return struct.pack(f"<I{form}", {"I": 4, "i": 5, "f": 6, "B": 0, "Q": 10}[form], value)


def text(value: str) -> bytes:
    return struct.pack("<I", 8) + _text(value)


def texts(values: list[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(_text, values))


def numbers(values: list[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}i", 9, 5, len(values), *values)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
