"""One warp of the PTX machine: 32 threads that execute each instruction together."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from helpers.ptx.memory import Memory, PtxError
from helpers.ptx.numbers import (
    BINARY,
    COMPARISONS,
    LANES,
    NUMPY,
    UNARY,
    Bits,
    from_bits,
    fused,
    halves,
    joined,
    to_bits,
)

_EIGHT = np.arange(LANES) < 8
_ROW, _COLUMN = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2  # of a thread's two numbers in a matrix of 8 x 8
_ALL = np.ones(LANES, bool)
_UNKNOWN = {"sat", "relu", "rz", "rm", "rp", "cc", "saturate"}  # modifiers
_WHOLE: dict[str, Callable[[Bits], Bits]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_REGISTER = re.compile(r"%[a-z]+\d+")
_SIXTEEN_BITS = ("bf16", "f16")
_UNWRITTEN = np.full(LANES, 0x7FFF7FFF7FFF7FFF, np.uint64)  # NaN of any type, or far away


class Instruction(NamedTuple):
    negated: bool  # its predicate
    predicate: str
    op: str
    mods: list[str]
    operands: Sequence[str]


class Code(NamedTuple):
    """What all warps of a program execute."""

    instructions: Sequence[Instruction]
    labels: Mapping[str, int]
    arguments: Mapping[str, float]
    program: tuple[int, int]  # and of how many
    num_threads: int


class Warp:
    """32 threads of a program."""

    def __init__(self, code: Code, number: int, memory: Memory, shared: Memory, random: np.random.Generator) -> None:
        self._code, self._number, self._memory, self._shared = code, number, memory, shared
        self._random, lanes = random, np.arange(LANES)
        self._special = {"%tid.x": LANES * number + lanes, "%ntid.x": code.num_threads, "%ctaid.x": code.program[0]}
        self._special |= {"%nctaid.x": code.program[1], "%laneid": lanes, "global_smem": 0}
        self._registers: dict[str, Bits] = {}
        self._copies: list[list[Callable[[], None]]] = [[]]

    def run(self) -> Iterator[None]:
        """Yields at each barrier."""
        place = 0
        while True:
            negated, predicate, op, mods, operands = self._code.instructions[place]
            place += 1
            mask = (self._registers[predicate] != 0) ^ negated if predicate else _ALL
            if op == "bra":
                if mask.any() and not mask.all():
                    raise PtxError("threads of a warp part ways")
                if mask.all():
                    place = self._code.labels[operands[0]]
            elif op == "ret":
                if mask.any() and not mask.all():
                    raise PtxError("threads of a warp part ways")
                if mask.all():
                    return
            elif op in ("bar", "barrier"):
                if mods[0] != "warp":
                    if not mask.all() or list(operands) != ["0"]:
                        raise PtxError(f"{op}.{'.'.join(mods)} {', '.join(operands)} of some threads is not here")
                    yield
            elif op in ("fence", "griddepcontrol"):
                pass
            elif mask is _ALL or mask.any():
                self._execute(op, mods, operands, mask)

    # Operands.

    def _read(self, operand: str, kind: str) -> Bits:
        """The numbers of a register, a constant or a special register."""
        if (bits := self._registers.get(operand)) is not None:
            return from_bits(bits, kind)
        if operand in self._special:
            return np.broadcast_to(np.asarray(self._special[operand], np.uint64), LANES).astype(NUMPY[kind])
        if operand[0] == "%" and not _REGISTER.fullmatch(operand):
            raise PtxError(f"{operand} is not here")
        if operand[0] not in "-0123456789":
            return from_bits(_UNWRITTEN, kind)
        if operand.startswith(("0f", "0d")):
            number = np.array([int(f"0x{operand[2:]}", 0)], np.uint64)
            return np.broadcast_to(from_bits(number, "f32" if operand[1] == "f" else "f64"), LANES)
        number = int(operand.rstrip("U"), 0) & (1 << 64) - 1
        return from_bits(np.full(LANES, number, np.uint64), kind)

    def _write(self, register: str, bits: Bits, mask: Bits) -> None:
        bits = bits.astype(np.uint64)
        self._registers[register] = (
            bits if mask is _ALL else np.where(mask, bits, self._registers.get(register, _UNWRITTEN))
        )

    def _address(self, operand: str) -> Bits:
        base, _, offset = operand.strip("[] ").partition("+")
        return self._read(base.strip(), "u64" if base.startswith("%rd") else "u32").astype(np.int64) + int(offset or 0)

    # Instructions.

    def _execute(self, op: str, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        if unknown := set(mods[:-1]) & _UNKNOWN:
            raise PtxError(f"{op}.{'.'.join(mods)} is not here: {unknown}")
        if special := getattr(self, f"_{op}", None):
            special(mods, operands, mask)
            return
        kind, target, *given = mods[-1], *operands
        op = f"{op}.NaN" if "NaN" in mods else op
        if kind.endswith("x2") and op in BINARY:
            kind = kind[:-2]
            pairs = zip(*(halves(self._read(each, "b32").astype(np.uint64), kind) for each in given), strict=True)
            self._write(target, joined([BINARY[op](*pair) for pair in pairs], kind), mask)
        elif kind == "pred":
            numbers = [self._read(each, "b32") != 0 for each in given]
            self._write(target, BINARY[op](*numbers) if op in BINARY else ~numbers[0], mask)
        elif op in UNARY:
            self._write(target, to_bits(UNARY[op](self._read(given[0], kind)), kind), mask)
        elif op not in BINARY or len(given) != 2:
            raise PtxError(f"{op}.{'.'.join(mods)} is not here")
        else:
            a, b = self._read(given[0], kind), self._read(given[1], "u32" if op in ("shl", "shr") else kind)
            if op == "mul" and mods[0] in ("wide", "hi"):
                self._write(target, self._product(a, b, kind, mods[0]), mask)
            else:
                self._write(target, to_bits(BINARY[op](a, b), kind), mask)

    @staticmethod
    def _product(a: Bits, b: Bits, kind: str, part: str) -> Bits:
        size = int(kind[1:])
        if size > 32:
            raise PtxError(f"mul.{part}.{kind} is not here")
        wide = a.astype(NUMPY[f"{kind[0]}64"]) * b.astype(NUMPY[f"{kind[0]}64"])
        return (wide if part == "wide" else wide >> size).view(np.uint64)

    def _mad(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        kind = mods[-1]
        a, b = (self._read(each, kind) for each in given[:2])
        if mods[0] == "hi":
            raise PtxError(f"mad.{'.'.join(mods)} is not here")
        if mods[0] == "wide":
            bits = self._product(a, b, kind, "wide") + self._read(given[2], "u64")
        else:
            bits = to_bits(a * b + self._read(given[2], kind), kind)
        self._write(target, bits, mask)

    def _fma(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        kind = mods[-1].removesuffix("x2")
        if mods[-1].endswith("x2"):
            threes = zip(*(halves(self._read(each, "b32").astype(np.uint64), kind) for each in given), strict=True)
            self._write(target, joined([fused(*three) for three in threes], kind), mask)
        elif kind == "f64":
            raise PtxError("fma.f64 is not here")
        else:
            self._write(target, to_bits(fused(*(self._read(each, kind) for each in given)), kind), mask)

    def _mov(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, given = operands
        size = 32 if mods[-1] == "pred" else int(mods[-1][1:])
        if target[0] == "{":
            parts = _names(target)
            bits, each = self._read(given, f"b{size}").astype(np.uint64), size // len(parts)
            for number, name in enumerate(parts):
                if name != "_":
                    self._write(name, bits >> (each * number) & ((1 << each) - 1), mask)
        elif given[0] == "{":
            parts = _names(given)
            each, bits = size // len(parts), np.zeros(LANES, np.uint64)
            for number, name in enumerate(parts):
                bits |= self._read(name, f"b{each}").astype(np.uint64) << np.uint64(each * number)
            self._write(target, bits, mask)
        else:
            kind = f"b{size}"
            self._write(target, self._read(given, kind).view(f"u{size // 8}"), mask)

    def _cvt(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        to, source = mods[-2:]
        if to.endswith("x2"):  # the first operand becomes the upper half
            high, low = (self._read(each, source) for each in given)
            self._write(target, joined([low, high], to[:-2]), mask)
            return
        numbers = self._read(given[0], source)
        if whole := _WHOLE.get(mods[0]):
            numbers = whole(numbers)
        if numbers.dtype.kind == "f" and to[0] in "us":
            limits = np.iinfo(NUMPY[to])
            numbers = np.clip(np.nan_to_num(numbers.astype(np.float64)), limits.min, limits.max)
        bits = numbers.astype(NUMPY[to]).astype(np.int64).view(np.uint64) if to[0] == "s" else to_bits(numbers, to)
        self._write(target, bits, mask)

    def _setp(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        if mods[0] not in COMPARISONS or len(given) > 2 or "|" in target:
            raise PtxError(f"setp.{'.'.join(mods)} is not here")
        self._write(target, COMPARISONS[mods[0]](*(self._read(each, mods[-1]) for each in given[:2])), mask)

    def _selp(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, a, b, predicate = operands
        chosen = self._registers[predicate] != 0
        self._write(target, np.where(chosen, *(to_bits(self._read(each, mods[-1]), mods[-1]) for each in (a, b))), mask)

    def _prmt(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        if mods != ["b32"]:
            raise PtxError(f"prmt.{'.'.join(mods)} is not here")
        a, b, selector = (self._read(each, "b32").astype(np.uint64) for each in given)
        both, bits = a | b << np.uint64(32), np.zeros(LANES, np.uint64)
        for number in range(4):
            chosen = selector >> np.uint64(4 * number) & np.uint64(15)
            byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            bits |= np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * number)
        self._write(target, bits, mask)

    def _bfe(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        if mods[-1] not in ("u32", "s32"):
            raise PtxError(f"bfe.{mods[-1]} is not here")
        number = self._read(given[0], mods[-1]).astype(np.int64)
        first, length = (self._read(each, "u32").astype(np.int64) for each in given[1:])
        bits = number << 64 - first - length >> 64 - length
        if mods[-1] == "u32":
            bits &= (1 << length) - 1
        self._write(target, bits.astype(np.int32).view(np.uint32), mask)

    def _bfi(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given = operands
        if mods != ["b32"]:
            raise PtxError(f"bfi.{'.'.join(mods)} is not here")
        field, number, first, length = (
            self._read(each, "b32").astype(np.uint64) & np.uint64(0xFFFFFFFF) for each in given
        )
        if (first + length > 32).any():
            raise PtxError("bfi beyond bit 31 is not here")
        place = (np.uint64(1) << length) - np.uint64(1) << first
        self._write(target, field << first & place | number & ~place, mask)

    def _lop3(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, *given, table = operands
        inputs, bits = [self._read(each, "b32").astype(np.uint64) for each in given], np.zeros(LANES, np.uint64)
        for row in range(8):
            if int(table, 0) >> row & 1:
                chosen = [x if row >> 2 - i & 1 else ~x for i, x in enumerate(inputs)]
                bits |= chosen[0] & chosen[1] & chosen[2]
        self._write(target, bits & np.uint64(0xFFFFFFFF), mask)

    def _shfl(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, given, lane, clamp, members = operands
        if int(clamp, 0) != 31 or not (mask & (self._read(members, "u32") == 0xFFFFFFFF)).all():
            raise PtxError(f"shfl in parts of a warp is not here: {clamp}, {members}")
        target, _, valid = target.partition("|")
        own, by = np.arange(LANES), self._read(lane, "u32").astype(np.int64)
        source = {"bfly": own ^ by, "idx": by & 31, "down": own + by, "up": own - by}[mods[1]]
        there = (source >= 0) & (source < LANES)
        self._write(target, self._read(given, "b32").astype(np.uint64)[np.where(there, source, own)], mask)
        if valid:
            self._write(valid, there, mask)

    def _redux(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        """Of all threads of the warp."""
        target, given, members = operands
        if not (mask & (self._read(members, "u32") == 0xFFFFFFFF)).all():
            raise PtxError(f"redux of some threads is not here: {members}")
        numbers = self._read(given, mods[-1])
        total = numbers[:1]
        for number in range(1, LANES):
            total = BINARY[mods[1]](total, numbers[number : number + 1])
        self._write(target, np.broadcast_to(to_bits(total, mods[-1]), LANES), mask)

    # Memory.

    def _ld(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, source = operands
        if mods[0] == "param":
            name, _, offset = source.strip("[] ").partition("+")
            assert not offset
            value = self._code.arguments[name]
            numbers = np.full(LANES, value, np.float32 if isinstance(value, float) else np.int64)
            self._write(target, to_bits(numbers, "f32" if isinstance(value, float) else "s64"), mask)
            return
        self._each(mods, target, source, mask, self._load)

    def _st(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, source = operands
        self._each(mods, source, target, mask, self._store)

    def _atom(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        target, place, given = operands
        if mods[-2] != "add" or mask.sum() > 1:
            raise PtxError(f"atom.{'.'.join(mods)} of {mask.sum()} threads is not here")
        self._each(mods, target, place, mask, self._load)
        total = self._read(target, mods[-1]) + self._read(given, mods[-1])
        self._memory.store(self._address(place), np.ascontiguousarray(total)[:, None].view(np.uint8), mask)

    def _each(self, mods: list[str], names: str, place: str, mask: Bits, move: Callable[..., None]) -> None:
        parts, size = _names(names), int(mods[-1].lstrip("busf")) // 8
        memory, addresses = self._shared if "shared" in mods[0] else self._memory, self._address(place)
        memory.check(addresses, size * len(parts), mask)
        for number, name in enumerate(parts):
            move(memory, name, addresses + size * number, size, mask, mods[-1])

    def _load(self, memory: Memory, name: str, addresses: Bits, size: int, mask: Bits, kind: str) -> None:
        bits = memory.load(addresses, size, mask).view(f"u{size}")[:, 0]
        if kind[0] == "s":  # into a wider register
            bits = bits.view(f"i{size}").astype(np.int64).view(np.uint64)
        self._write(name, bits, mask)

    def _store(self, memory: Memory, name: str, addresses: Bits, size: int, mask: Bits, kind: str) -> None:
        bits = self._read(name, f"b{8 * size}").view(f"u{size}")
        memory.store(addresses, np.ascontiguousarray(bits)[:, None].view(np.uint8), mask)

    def _cp(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        if mods[1] == "commit_group":
            self._copies.append([])
        elif mods[1] == "wait_group":
            keep = int(operands[0]) + 1  # and those that no group has yet
            while len(self._copies) > keep:
                for copy in self._copies.pop(0):
                    copy()
        elif mods[1] in ("ca", "cg"):
            target, source, size = self._address(operands[0]), self._address(operands[1]), int(operands[2], 0)
            given = mask & (self._read(operands[3], "u32") > 0) if len(operands) > 3 else mask
            loaded = self._memory.load(source, size, given)
            if self._random.integers(2):
                self._shared.store(target, loaded, mask)  # at once
            else:
                self._copies[-1].append(lambda: self._shared.store(target, loaded, mask))
        else:
            raise PtxError(f"cp.{'.'.join(mods)} is not here")

    # Matrix units.

    def _ldmatrix(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        for name, addresses in self._matrices(operands[0], operands[1]):
            rows = self._shared.load(addresses, 16, _EIGHT)[:8].view(np.uint16)
            matrix = rows.T if "trans" in mods else rows
            low, high = (matrix[_ROW, _COLUMN + half].astype(np.uint64) for half in (0, 1))
            self._write(name, low | high << np.uint64(16), mask)

    def _stmatrix(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        for name, addresses in self._matrices(operands[1], operands[0]):
            rows = np.zeros((LANES, 8), np.uint16)
            bits = self._read(name, "b32")
            for half in (0, 1):
                place = (_COLUMN + half, _ROW) if "trans" in mods else (_ROW, _COLUMN + half)
                rows[place] = bits >> np.uint32(16 * half) & np.uint32(0xFFFF)
            self._shared.store(addresses, rows.view(np.uint8), _EIGHT)

    def _matrices(self, names: str, place: str) -> Iterator[tuple[str, Bits]]:
        """The register of each 8 x 8 matrix, and the addresses of its rows in the first eight threads: eight others have them."""
        addresses = self._address(place)
        for number, name in enumerate(_names(names)):
            yield name, np.roll(addresses, -8 * number)

    def _mma(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        kind = mods[-2]
        if mods[2] != "m16n8k16" or kind not in _SIXTEEN_BITS or mods[-1] != "f32":
            raise PtxError(f"mma.{'.'.join(mods)} is not here")
        targets, a, b, c = map(_names, operands)
        right = np.zeros((16, 8))
        for number, name in enumerate(b):
            for half, numbers in enumerate(halves(self._read(name, "b32").astype(np.uint64), kind)):
                right[_COLUMN + half + 8 * number, _ROW] = numbers
        self._add_product(targets, c, self._left(a, kind), right, mask)

    def _wgmma(self, mods: list[str], operands: Sequence[str], mask: Bits) -> None:
        """The warp's 16 of the 64 rows that four warps compute. Waiting for it is left out: what it reads is there already."""
        if mods[0] != "mma_async":  # fence, commit_group, wait_group
            return
        kind, num_columns = mods[-1], int(mods[3].partition("n")[2].partition("k")[0])
        targets, left, right, added, *rest = operands
        if kind not in _SIXTEEN_BITS or mods[4] != "f32" or not mods[3].endswith("k16") or "-1" in rest:
            raise PtxError(f"wgmma.{'.'.join(mods)} is not here")
        if left[0] == "{":
            own, turned = self._left(_names(left), kind), rest[2]
        else:
            assert rest[2] == "0", "rows of A that are columns in memory"
            rows = 16 * (self._number % 4) + np.arange(16)
            own, turned = self._described(left, rows, False, kind), rest[3]
        columns = self._described(right, np.arange(num_columns), turned == "1", kind)
        adds = bool(int(added)) if added.isdigit() else bool(self._registers[added].any())
        self._add_product(_names(targets), _names(targets) if adds else [], own, columns.T, mask)

    def _described(self, descriptor: str, rows: Bits, turned: bool, kind: str) -> Bits:
        """(rows, 16) numbers of a matrix in shared memory. ``turned``: numbers that follow each other are of different rows."""
        bits = int(self._read(descriptor, "u64")[0])
        start, leading, stride = (16 * (bits >> at & 0x3FFF) for at in (0, 16, 32))
        wide = {1: 128, 2: 64, 3: 32}[bits >> 62]  # bytes of a row of the tiles, whose sixteens are exchanged
        column, row = np.arange(16)[None, :], rows[:, None]
        if turned:
            of_row = row % (wide // 2) * 2 + row // (wide // 2) * leading
            places = start + of_row + column % 8 * wide + column // 8 * stride
        else:
            places = start + row % 8 * wide + row // 8 * stride + column * 2
        places ^= (places >> 7 & wide // 16 - 1) << 4
        found = np.zeros(places.shape)
        for first in np.ndindex(places.shape[0] // 2):  # as many as threads at a time
            pair = slice(2 * first[0], 2 * first[0] + 2)
            loaded = self._shared.load(places[pair].ravel(), 2, np.ones(LANES, bool))
            found[pair] = from_bits(loaded.view(np.uint16)[:, 0].astype(np.uint64), kind).reshape(2, 16)
        return found

    def _left(self, names: list[str], kind: str) -> Bits:
        """(16, 16) numbers of four registers."""
        left = np.zeros((16, 16))
        for number, name in enumerate(names):
            for half, numbers in enumerate(halves(self._read(name, "b32").astype(np.uint64), kind)):
                left[_ROW + 8 * (number % 2), _COLUMN + half + 8 * (number // 2)] = numbers
        return left

    def _add_product(self, targets: list[str], given: list[str], left: Bits, right: Bits, mask: Bits) -> None:
        """left @ right and what is ``given``: four registers for each eight columns."""
        product = left @ right
        for number, name in enumerate(targets):
            place = _ROW + 8 * (number % 4 // 2), 8 * (number // 4) + _COLUMN + number % 2
            added = self._read(given[number], "f32").astype(np.float64) if given else 0.0
            self._write(name, to_bits(product[place] + added, "f32"), mask)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]
