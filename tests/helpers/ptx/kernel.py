"""Runs compiled Triton kernels on a CPU: what PTX says, instruction by instruction, without a GPU.

The threads of a warp execute each instruction together. Warps run one after the other, in a random order, up to the next
barrier, so a kernel that lacks one gives wrong numbers. Programs start in a random order, and a few of them take turns of
one or more warps; those that wait for other processes run one by one, in order. An asynchronous copy arrives at once or when
it is waited for, at random. A byte outside of the memory of all tensors and of shared memory ends the run, and what was
never written is NaN.

Not here: threads of a warp that part ways, waiting for Hopper's matrix units, the order of memory between processes, and what
no kernel of ours compiles to, which raises ``PtxError``. Results are PTX's but for these: matrix units, whose order of adding
no document says, add in float64 and round once; approximations (``ex2.approx``, ``rcp``, ``div.full``) are exact; denormals
are not flushed; NaNs, and zeros of both signs in a minimum, are not told apart.
"""

import ctypes
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from helpers.ptx.memory import Memory, PtxError
from helpers.ptx.numbers import LANES, Bits
from helpers.ptx.warp import Code, Instruction, Warp

_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_LINE = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
_C_TYPES = {"u64": ctypes.c_int64, "u32": ctypes.c_int32, "f32": ctypes.c_float}  # of a kernel's parameters
_PROGRAMS_AT_ONCE = 4
_PEER_BUFFERS = "tightwire-peer-buffers"  # the name of a file that processes map to sum each other's numbers


class PtxKernel:
    """A compiled kernel that can be called with CPU tensors."""

    def __init__(self, ptx: str, shared_bytes: int) -> None:
        head, _, body = ptx.partition(")\n")
        self._parameters = re.findall(r"\.param \.(\w+) .*?(\w+_param_\d+)", head)
        found = re.search(r"\.reqntid (\d+)", body)
        assert found is not None
        self._num_threads, self._shared_bytes = int(found[1]), shared_bytes
        self._instructions, self._labels = list[Instruction](), dict[str, int]()
        body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.index("$L__func_end")])
        for label, line in re.findall(r"(\$\w+):|([^;\n{}][^;\n]*);", body):
            if label:
                self._labels[label] = len(self._instructions)
            elif (line := line.strip().lstrip("{} ")) and line[0] != ".":
                parts = _LINE.fullmatch(line)
                if parts is None:
                    raise PtxError(f"cannot read {line!r}")
                operands = [each.strip() for each in _OPERAND.findall(parts[4])]
                op, *mods = parts[3].split(".")
                self._instructions.append(Instruction(parts[1] == "!", parts[2] or "", op, mods, operands))

    def __call__(
        self, num_programs: int, tensors: Sequence[torch.Tensor], parameters: Sequence[int] = (), seed: int = 0
    ) -> None:
        """Run all programs on the memory of ``tensors``, which are the parameters unless their addresses are given."""
        memory = Memory([*{first: (first, data) for first, data in map(_region, tensors)}.values(), *_peer_buffers()])
        own = [ctypes.c_int64(each.data_ptr()) for each in tensors]
        places = parameters or [ctypes.addressof(each) for each in own]
        given = {
            name: _C_TYPES[kind].from_address(places[place]).value
            for place, (kind, name) in enumerate(self._parameters)
        }
        generator = np.random.default_rng(seed)

        def start(program: int) -> Iterator[None]:
            code = Code(self._instructions, self._labels, given, (program, num_programs), self._num_threads)
            shared = Memory([(0, np.full(self._shared_bytes, 0x7F, np.uint8))])
            numbers = range(self._num_threads // LANES)
            return _run([Warp(code, number, memory, shared, generator).run() for number in numbers], generator)

        waits = any("sys" in each.mods for each in self._instructions)
        programs = map(start, range(num_programs) if waits else generator.permutation(num_programs).tolist())
        running = list(islice(programs, 1 if waits else _PROGRAMS_AT_ONCE))
        with np.errstate(all="ignore"):
            while running:
                chosen, num_turns = generator.integers(len(running)), 4 ** int(generator.integers(4))
                if sum(1 for _ in islice(running[chosen], num_turns)) < num_turns:
                    running[chosen : chosen + 1] = islice(programs, 1)


def _run(warps: list[Iterator[None]], generator: np.random.Generator) -> Iterator[None]:
    """Yields when a warp is at a barrier or its end."""
    going = [True]
    while all(going):
        going = list[bool]()
        for number in generator.permutation(len(warps)):
            going.append(next(warps[number], "ended") is None)
            yield
    if any(going):
        raise PtxError("some warps of a program end before a barrier of the others")


def _region(tensor: torch.Tensor) -> tuple[int, Bits]:
    """A tensor's whole memory."""
    own = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # pyright: ignore[reportArgumentType]
    return own.data_ptr(), own.numpy()


def _peer_buffers() -> Iterator[tuple[int, Bits]]:
    """What this process maps of peer buffers, whose addresses kernels find in a tensor."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _PEER_BUFFERS in line:
            first, stop = (int(word, 16) for word in line.split()[0].split("-"))
            yield first, np.ctypeslib.as_array((ctypes.c_uint8 * (stop - first)).from_address(first))
