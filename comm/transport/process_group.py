"""Transports over torch.distributed, without its global state: gloo between CPU processes, NCCL between GPUs."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, Work

from tightwire.comm import errors
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.protocols import FusedAllReduce, Moved, Transport, nothing_told
from tightwire.comm.transport.deadline import within
from tightwire.comm.transport.store_notes import FailureNotes, Note

_TIME_SPENT = re.compile(r", [0-9.]+ s$")  # at the end of a description of a running collective
_MAX_TAG = (1 << 31) - 1
_PIECE_BYTES = 8 << 20  # the part of a long gather, to each rank, between two progress reports
_SIZED_BY_RANK = ("sparse_all_gather", "deliver")  # collectives whose message size may differ by rank


class TransferError(RuntimeError):
    """A message that did not move, with the ranks it was for or from. They were silent or called another collective if ``timed_out``."""

    def __init__(self, message: str, ranks: Iterable[int], *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.timed_out = tuple(sorted(ranks)), timed_out


class ProcessGroupTransport(Transport):
    """The common part of gloo and NCCL: the library's sum, and errors that name ranks."""

    def __init__(
        self,
        process_group: Any,  # ProcessGroupGloo or ProcessGroupNCCL; the latter does not exist in CPU builds
        notes: FailureNotes,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        ledger: Ledger | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = 0
        self.fused: FusedAllReduce | None = None
        self.device, self.timeout_s = device, timeout_s
        self.ledger = Ledger() if ledger is None else ledger  # describes the running collective of the group
        self._group, self._notes = process_group, notes
        self._check: Callable[[], None] = lambda: None
        self._others = [(rank + i) % world_size for i in range(1, world_size)]
        self._peer: int | None = None  # the rank that the current wait is for, when it is one rank
        self._failure: errors.CommError | None = None
        self.numbered: errors.Numbered = lambda error: error

    def add_fused(self, fused: FusedAllReduce, check: Callable[[], None]) -> None:
        """Use ``fused``; messages first call its ``check``, which raises if it has failed. Collective."""
        self.barrier()  # all ranks are ready, and the library's connections exist
        self.fused, self._check = fused, check

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        return self.deliver(slices, [slices[self.rank].numel()] * self.world_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The library's sum. Counts a ring's bytes, rounded down to whole elements, because no library reports its bytes."""
        result = x.clone(memory_format=torch.contiguous_format)
        self._call("allreduce", [result], AllreduceOptions())
        self.bytes_sent += 2 * (self.world_size - 1) * x.numel() // self.world_size * x.element_size()
        return result

    def close(self) -> None:
        """Drop the connections, so that waiting ranks fail; gloo closes them only when nothing refers to the object."""
        self._group = None

    def _open_group(self) -> Any:
        self._check()
        if self._group is None:
            raise self._failure or errors.CommError(f"rank {self.rank}: this group is closed")
        return self._group

    def _call(self, method: str, *args: Any) -> None:
        try:
            getattr(self._open_group(), method)(*args).wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> errors.CommError:
        """Close the group and return the error that names the ranks at fault, for a library ``error``."""
        if isinstance(error, errors.CommError):
            return error
        # The traceback's frames reference the running operations, which reference the group that must be freed.
        error.__traceback__ = None
        if not isinstance(error, TransferError):
            awaited = () if self._peer is None else (self._peer,)
            error = TransferError(str(error), awaited, timed_out=_is_timeout(error))
        doing = f"rank {self.rank} in {self.ledger.current() or 'a barrier'}"
        own = Note(timed_out=error.timed_out, missed=error.ranks, doing=doing)
        # Closing makes the ranks that wait for this one fail too and leave their notes.
        self.close()
        culprits, notes = self._notes.blame(own, self.timeout_s)
        self._failure = self.numbered(self._explain(own, notes, culprits, error))
        return self._failure

    def _explain(self, own: Note, notes: dict[int, Note], culprits: set[int], error: RuntimeError) -> errors.CommError:
        doing = {self.rank: own.doing, **{rank: note.doing for rank, note in notes.items()}}
        reports = "; ".join(doing.get(rank, f"rank {rank}: no report") for rank in range(self.world_size))
        waiting = f"Waiting: {reports}. ({str(error).splitlines()[0].split('. ')[0]})"
        named = f"{errors.name_ranks(culprits)} of {self.world_size}"
        if own.timed_out or any(note.timed_out for note in notes.values()):
            calls = {rank: _TIME_SPENT.sub("", words.partition(" in ")[2]) for rank, words in doing.items()}
            if len(calls) == self.world_size and len(set(calls.values())) > 1:  # all ranks came, but to different calls
                text = f"rank {self.rank} of {self.world_size}: the ranks called different collectives. {waiting}"
                return errors.CollectiveMismatchError(text, errors.unlike_most(calls))
            text = f"{named} did not arrive within {self.timeout_s:g} s: hung, stopped or busy elsewhere. {waiting}"
            return errors.CollectiveTimeoutError(text, culprits)
        text = f"lost {named}: the process died, closed its group or is cut off. {waiting}"
        return errors.PeerLostError(text, culprits)


class GlooTransport(ProcessGroupTransport):
    """Point-to-point messages between CPU processes.

    Gloo's own all-to-all and all-gather pass each call to a worker thread. Its sends and receives do not, and take half
    the time at decode sizes (two ranks, 1152 bytes: 72 us against 124 and 158). They also know which rank they wait
    for.
    """

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return self.deliver([buf] * self.world_size, [buf.numel()] * self.world_size if sizes is None else sizes)

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        parts = out.view(self.world_size, buf.numel())
        parts[self.rank].copy_(buf)
        for start in range(0, buf.numel(), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            self._swap([buf[start:end]] * self.world_size, list(parts[:, start:end]))
            moved(parts[:, start:end].numel())

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        received = buf.new_empty(buf.numel() if recv_bytes is None else recv_bytes)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self._send_recv([(after, buf)], [(before, received)])
        return received

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        received = [part if peer == self.rank else part.new_empty(recv_bytes[peer]) for peer, part in enumerate(parts)]
        self._swap(parts, received)
        return received

    def barrier(self) -> None:
        sent_before = self.bytes_sent
        self.gather(torch.zeros(1, dtype=torch.uint8))
        self.bytes_sent = sent_before  # a barrier has no payload

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        sends = [(peer, outgoing[peer]) for peer in self._others]
        self._send_recv(sends, [(peer, incoming[peer]) for peer in self._others])

    def _send_recv(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        try:
            self._transfer(sends, receives)  # its frame, which references the group, ends before a failure closes it
        except RuntimeError as error:
            raise self._failed(error) from error
        for _, buf in sends:
            self.bytes_sent += buf.numel()

    def _transfer(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        """Run all messages at once, receives posted first; empty ones are not sent.

        Tags hold size and collective, so a mismatch times out on both sides; gloo would end the process or mix tensors.
        """
        group, call = self._open_group(), self.call_tag()
        works: list[tuple[int, Work]] = []
        for self._peer, buf in receives:
            if buf.numel():
                works.append((self._peer, group.recv([buf], self._peer, (buf.numel() ^ call) & _MAX_TAG)))
        for self._peer, buf in sends:
            if buf.numel():
                works.append((self._peer, group.send([buf], self._peer, (buf.numel() ^ call) & _MAX_TAG)))
        for self._peer, work in works:
            work.wait()
        self._peer = None

    def call_tag(self) -> int:
        """A number that differs between collectives, for messages to carry."""
        begun = self.ledger.begun
        return 0 if begun is None else _tag(*begun[:3])


class NcclTransport(ProcessGroupTransport):
    """The library's collective calls, which NCCL enqueues on the current CUDA stream; the host does not wait.

    So this class does not detect a rank that never comes. NCCL's watchdog ends the process after the group's timeout
    and logs the collective; the launcher sees the process exit.
    """

    def close(self) -> None:
        if self._group is not None:
            # Its shutdown waits for the other ranks, and for graphs that have its calls.
            with suppress(errors.CommError):
                within(2.0, self._group.abort, lambda: "still aborts")
        super().close()

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        own_bytes = buf.numel()
        if sizes is None or len(set(sizes)) == 1:
            received = self._all_gather(buf)
        elif sum(map(bool, sizes)) == 1:
            received = self._broadcast(buf, sizes)
        else:
            # NCCL's own gather needs equal sizes, and padding would send extra bytes. Its exchange needs a copy for every
            # rank, which is cheap for slices: they are small when there are many ranks.
            received = self._all_to_all(buf.repeat(self.world_size), [own_bytes] * self.world_size, list(sizes))
        self.bytes_sent += (self.world_size - 1) * own_bytes
        return received

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        self._call("_allgather_base", out, buf)
        self.bytes_sent += (self.world_size - 1) * buf.numel()

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        outgoing, incoming = [0] * self.world_size, [0] * self.world_size
        outgoing[after] = buf.numel()
        incoming[before] = buf.numel() if recv_bytes is None else recv_bytes
        received = self._all_to_all(buf, outgoing, incoming)[before]
        self.bytes_sent += buf.numel()
        return received

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        outgoing = [part.numel() for part in parts]
        received = self._all_to_all(torch.cat(list(parts)), outgoing, list(recv_bytes))
        self.bytes_sent += sum(outgoing) - outgoing[self.rank]
        return received

    def barrier(self) -> None:
        """Waits on the host too, unlike the other calls."""
        torch.cat(self._all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device))).cpu()
        self._check()

    def _all_gather(self, buf: Tensor) -> list[Tensor]:
        received = buf.new_empty(self.world_size * buf.numel())
        self._call("_allgather_base", received, buf)
        return list(received.chunk(self.world_size))

    def _broadcast(self, buf: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Gather where only one rank's size is not zero: no copies on that rank."""
        options = BroadcastOptions()
        options.rootRank = root = next(rank for rank, size in enumerate(sizes) if size)
        received = [buf.new_empty(0)] * self.world_size
        received[root] = buf if self.rank == root else buf.new_empty(sizes[root])
        self._call("broadcast", [received[root]], options)
        return received

    def _all_to_all(self, buf: Tensor, outgoing: list[int], incoming: list[int]) -> list[Tensor]:
        received = buf.new_empty(sum(incoming))
        self._call("alltoall_base", received, buf, incoming, outgoing)
        return list(received.split(incoming))


@lru_cache(maxsize=4096)
def _tag(op: str, algorithm: str, num_bytes: int) -> int:
    """Return a number that is equal on ranks that run the same collective with the same message size."""
    return crc32(f"{op} {algorithm} {0 if op in _SIZED_BY_RANK else num_bytes}".encode())


def _is_timeout(error: RuntimeError) -> bool:
    # Gloo: "Timed out waiting 5000ms for recv operation to complete"; NCCL: "... timed out ...". "Application timeout
    # caused pair closure" follows an earlier time-out on this rank.
    text = str(error).lower()
    return "timed out" in text or "application timeout" in text
