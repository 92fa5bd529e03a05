"""Start-up check for broken kernels, drivers and cables: the algorithms sum known numbers in the model's sizes."""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tightwire.comm.all_reduce.entry import SelfTestVerdict
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce

PHASE = "self-test"  # phase of these sums in the ledger
_DIGEST_BYTES = 8
_PROBLEM_BYTES = 240  # a fixed size, so that all ranks know how much to receive


def self_test(
    group: Group, candidates: Mapping[str, AllReduce], *, row_elems: int, max_rows: int, dtype: torch.dtype
) -> list[SelfTestVerdict]:
    """Check each of ``candidates`` with a message of one row and one of ``max_rows`` rows of ``row_elems``. Collective.

    Errors: a result further from the float64 sum than the algorithm's own ``max_error``, another shape or dtype, a
    changed input, a byte count other than ``wire_bytes``, an exception, or bits that differ between ranks. All ranks
    get the same verdicts. Raises CollectiveTimeoutError or PeerLostError if a rank does not arrive.
    """
    checks = [
        KnownSum(group.rank, group.world_size, rows * row_elems, dtype, group.device) for rows in sorted({1, max_rows})
    ]
    return [_judge(group, name, all_reduce, checks) for name, all_reduce in candidates.items()]


def agree(world: Group, verdicts: Sequence[SelfTestVerdict], group_size: int) -> list[SelfTestVerdict]:
    """Combine the verdicts of all groups of ``group_size`` ranks: wrong in one, wrong in all. Collective."""
    own = torch.tensor([not verdict.ok for verdict in verdicts], dtype=torch.uint8, device=world.device)
    reports = [report.tolist() for report in world.transport.gather(own)]
    agreed: list[SelfTestVerdict] = []
    for index, verdict in enumerate(verdicts):
        wrong = [rank for rank, report in enumerate(reports) if report[index]]
        if wrong and verdict.ok:
            group = range(wrong[0] // group_size * group_size, (wrong[0] // group_size + 1) * group_size)
            detail = f"correct here, wrong on ranks {group.start} to {group.stop - 1}; see their log"
            verdict = SelfTestVerdict(algorithm=verdict.algorithm, ok=False, detail=detail)
        agreed.append(verdict)
    return agreed


def _problem(group: Group, all_reduce: AllReduce, known: "KnownSum") -> tuple[str, bytes]:
    """The error found (empty: none), and a digest of the result's bits."""
    given, sent_before = known.own(), group.bytes_sent
    try:
        result = all_reduce(given, PHASE, feedback=Feedback())
        sent = group.bytes_sent - sent_before
        bits = result.contiguous().view(-1).view(torch.uint8).cpu().numpy()
        digest = hashlib.blake2b(bits.data, digest_size=_DIGEST_BYTES).digest()
        problem = _wrong(all_reduce, known, given, result, sent)
        return problem and f"{given.nbytes} B: {problem}", digest
    except CommError:
        raise
    except Exception as error:  # noqa: BLE001 - an algorithm that raises anything is not used
        return f"raised {type(error).__name__}: {error}", bytes(_DIGEST_BYTES)


def _wrong(all_reduce: AllReduce, known: "KnownSum", given: Tensor, result: Tensor, sent: int) -> str:
    if result.shape != given.shape or result.dtype != given.dtype:
        return f"gave {tuple(result.shape)} {result.dtype} for {tuple(given.shape)} {given.dtype}"
    if not known.is_own(given):
        return "changed its input"
    num_wrong, largest = known.errors(result, all_reduce)
    if num_wrong:
        return f"{num_wrong} of {given.numel()} sums exceed the error bound, the largest error is {largest:.3g}"
    stated = all_reduce.wire_bytes(given.numel(), given.element_size())
    return "" if sent == stated else f"sent {sent} B, expected {stated}"


def _judge(group: Group, name: str, all_reduce: AllReduce, checks: Sequence["KnownSum"]) -> SelfTestVerdict:
    found = [_problem(group, all_reduce, known) for known in checks]
    problem = next((problem for problem, _ in found if problem), "").encode()[:_PROBLEM_BYTES]
    own = struct.pack(f"{_PROBLEM_BYTES}s", problem) + b"".join(digest for _, digest in found)
    message = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group.device)
    reports = [report.cpu().numpy().tobytes() for report in group.transport.gather(message)]
    for rank, report in enumerate(reports):
        if text := report[:_PROBLEM_BYTES].rstrip(b"\0").decode(errors="replace"):
            return SelfTestVerdict(algorithm=name, ok=False, detail=f"rank {rank}: {text}")
    for rank, report in enumerate(reports):
        if report != reports[0]:
            return SelfTestVerdict(algorithm=name, ok=False, detail=f"ranks 0 and {rank} have different bits")
    detail = f"checked with {' and '.join(map(str, checks))} of {str(checks[0].dtype)[6:]}"
    return SelfTestVerdict(algorithm=name, ok=True, detail=detail)


_ALL_RANKS_ELEMS = 1 << 19  # random numbers of all ranks together: tens of milliseconds, tens of MiB for the bounds
_LEAST_ELEMS = 1 << 12  # the minimum for one rank, for any number of ranks
_PIECES = 4  # the random numbers are this many times as long as a piece
_GROUP_ELEMS = 128  # a multiple of every codec's group
_STEPS = 1 << 22  # steps per unit: numbers from -2 to 2, all exact in float32
_SEED = 1234


class KnownSum:
    """A message of ``num_elems`` for each rank with a known exact sum, the same on every machine.

    It repeats pieces of a limited number of random numbers, from random places, so that a misplaced part of the result
    is detected. The places are multiples of every codec's group size, so one error bound serves all copies of a piece.
    """

    def __init__(self, rank: int, world_size: int, num_elems: int, dtype: torch.dtype, device: torch.device) -> None:
        most = max(_LEAST_ELEMS, _ALL_RANKS_ELEMS // world_size)
        self.num_elems = num_elems
        self.random_elems = num_random = min(num_elems, most // _GROUP_ELEMS * _GROUP_ELEMS)
        # Whole numbers made on the CPU: float and GPU generators give different numbers on different processors.
        generator = torch.Generator().manual_seed(_SEED + num_elems)
        shape = (world_size, num_random)
        steps = torch.randint(-2 * _STEPS, 2 * _STEPS, shape, generator=generator, dtype=torch.int32)
        self._inputs = list((steps / _STEPS).to(dtype).to(device).unbind())
        self._own, self.dtype = self._inputs[rank], dtype
        self._exact = torch.zeros(num_random, dtype=torch.float64, device=device)
        for x in self._inputs:
            self._exact += x
        self._pieces = [slice(0, num_elems)]
        if num_elems > num_random:
            length = num_random // _PIECES // _GROUP_ELEMS * _GROUP_ELEMS
            num_places = (num_random - length) // _GROUP_ELEMS + 1
            places = torch.randint(num_places, (-(-num_elems // length),), generator=generator).tolist()
            self._pieces = [slice(start, start + length) for start in (_GROUP_ELEMS * place for place in places)]
            last = self._pieces[-1]
            self._pieces[-1] = slice(last.start, last.stop - len(places) * length + num_elems)

    def __str__(self) -> str:
        sizes = [num_elems * self.dtype.itemsize for num_elems in (self.num_elems, self.random_elems)]
        return f"{sizes[0]} B" + (f" ({sizes[1]} B, repeated)" if sizes[1] < sizes[0] else "")

    def own(self) -> Tensor:
        """This rank's message, (num_elems,), as a new tensor."""
        return torch.cat([self._own[piece] for piece in self._pieces])

    def is_own(self, x_N: Tensor) -> bool:
        return all(torch.equal(part, self._own[piece]) for part, piece in self._parts(x_N))

    def errors(self, result_N: Tensor, all_reduce: AllReduce) -> tuple[int, float]:
        """The number of sums of ``result_N`` outside ``all_reduce.max_error``, and the largest error (NaN if there is one)."""
        bound = all_reduce.max_error(self._inputs)
        last, last_bound = self._pieces[-1], None
        if (last.stop - last.start) % _GROUP_ELEMS:
            last_bound = all_reduce.max_error([x[last] for x in self._inputs])  # the last codec group is shorter here
        num_right, largest = [], []
        for part, piece in self._parts(result_N):
            error = part.double().sub_(self._exact[piece]).abs_()
            piece_bound = last_bound if last_bound is not None and piece is last else bound[piece]
            num_right.append((error <= piece_bound).sum())  # a NaN is never within the bound
            largest.append(error.max())
        return self.num_elems - int(torch.stack(num_right).sum()), float(torch.stack(largest).max())

    def _parts(self, x_N: Tensor) -> Iterator[tuple[Tensor, slice]]:
        lengths = [piece.stop - piece.start for piece in self._pieces]
        return zip(x_N.split(lengths), self._pieces, strict=True)
