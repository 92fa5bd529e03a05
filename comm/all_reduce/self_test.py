"""Start-up check: every algorithm that may be used sums known numbers, in the sizes and dtype of the model.

It detects a broken kernel, driver or cable before the first request. The ranks share their results, so all of them
quarantine the same algorithms.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.comm.all_reduce.known_sum import KnownSum
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce

PHASE = "self-test"  # of these sums in the ledger
_DIGEST_BYTES = 8
_PROBLEM_BYTES = 240  # a fixed size, so that all ranks know how much to receive


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """``detail``: the sizes checked, or the first rank that found an error, and the error."""

    algorithm: str
    ok: bool
    detail: str


def self_test(
    group: Group, candidates: Mapping[str, AllReduce], *, row_elems: int, max_rows: int, dtype: torch.dtype
) -> list[Verdict]:
    """Check each of ``candidates`` with a message of one row and one of ``max_rows`` rows of ``row_elems``.

    Errors: a result further from the float64 sum than the algorithm's own ``max_error``, another shape or dtype, a
    changed input, a byte count other than ``wire_bytes``, an exception, or bits that differ between ranks. Collective:
    all ranks pass the same arguments and get the same verdicts. A large message repeats a limited number of random
    numbers (``known_sum``); the verdict then says how many bytes of random numbers it has.

    Raises:
        CollectiveTimeoutError, PeerLostError: a rank did not arrive; the group cannot be used any more.
    """
    checks = [
        _Check(KnownSum(group.rank, group.world_size, rows * row_elems, dtype, group.device))
        for rows in sorted({1, max_rows})
    ]
    return [_judge(group, name, all_reduce, checks) for name, all_reduce in candidates.items()]


def agree(world: Group, verdicts: Sequence[Verdict], group_size: int) -> list[Verdict]:
    """Combine the verdicts of all groups of ``group_size`` ranks in ``world``: an algorithm wrong in one is wrong in all.

    Collective in ``world``: all ranks have verdicts on the same algorithms, in the same order.
    """
    own = torch.tensor([not verdict.ok for verdict in verdicts], dtype=torch.uint8, device=world.device)
    reports = [report.tolist() for report in world.transport.gather(own)]
    agreed: list[Verdict] = []
    for index, verdict in enumerate(verdicts):
        wrong = [rank for rank, report in enumerate(reports) if report[index]]
        if wrong and verdict.ok:
            group = range(wrong[0] // group_size * group_size, (wrong[0] // group_size + 1) * group_size)
            detail = f"right here, wrong between ranks {group.start} to {group.stop - 1}, whose log says how"
            verdict = Verdict(algorithm=verdict.algorithm, ok=False, detail=detail)
        agreed.append(verdict)
    return agreed


@dataclass(frozen=True, slots=True)
class _Check:
    known: KnownSum

    @property
    def words(self) -> str:
        known = self.known
        random_bytes = known.num_bytes * known.random_elems // known.num_elems
        return f"{known.num_bytes} B" + (f" ({random_bytes} B, repeated)" if random_bytes < known.num_bytes else "")

    def problem(self, group: Group, all_reduce: AllReduce) -> tuple[str, bytes]:
        """The error found (empty: none), and a digest of the result's bits."""
        given, sent_before = self.known.own(), group.bytes_sent
        try:
            result = all_reduce(given, PHASE)
            sent = group.bytes_sent - sent_before
            return self._wrong(all_reduce, given, result, sent), _digest(result)
        except CommError:
            raise
        except Exception as error:  # noqa: BLE001 - an algorithm that raises anything is not used
            return f"raised {type(error).__name__}: {error}", bytes(_DIGEST_BYTES)

    def _wrong(self, all_reduce: AllReduce, given: Tensor, result: Tensor, sent: int) -> str:
        size = f"{given.nbytes} B"
        if result.shape != given.shape or result.dtype != given.dtype:
            return f"{size}: gave {tuple(result.shape)} {result.dtype} for {tuple(given.shape)} {given.dtype}"
        if not self.known.is_own(given):
            return f"{size}: changed its input"
        num_wrong, largest = self.known.errors(result, all_reduce)
        if num_wrong:
            return f"{size}: {num_wrong} of {given.numel()} sums are off by more than it states, one by {largest:.3g}"
        stated = all_reduce.wire_bytes(given.numel(), given.element_size())
        return "" if sent == stated else f"{size}: sent {sent} B and states {stated}"


def _judge(group: Group, name: str, all_reduce: AllReduce, checks: Sequence[_Check]) -> Verdict:
    found = [check.problem(group, all_reduce) for check in checks]
    problem = next((problem for problem, _ in found if problem), "").encode()[:_PROBLEM_BYTES]
    own = struct.pack(f"{_PROBLEM_BYTES}s", problem) + b"".join(digest for _, digest in found)
    message = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(group.device)
    reports = [report.cpu().numpy().tobytes() for report in group.transport.gather(message)]
    for rank, report in enumerate(reports):
        if text := report[:_PROBLEM_BYTES].rstrip(b"\0").decode(errors="replace"):
            return Verdict(algorithm=name, ok=False, detail=f"rank {rank}: {text}")
    for rank, report in enumerate(reports):
        if report != reports[0]:
            return Verdict(algorithm=name, ok=False, detail=f"ranks 0 and {rank} hold different bits")
    sizes = " and ".join(check.words for check in checks)
    return Verdict(algorithm=name, ok=True, detail=f"checked with {sizes} of {str(checks[0].known.dtype)[6:]}")


def _digest(result: Tensor) -> bytes:
    raw = result.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(raw.data, digest_size=_DIGEST_BYTES).digest()
