"""Errors between ranks that name the ranks at fault."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence


class CommError(RuntimeError):
    """A collective failed. The group cannot be used any more; close it. ``ranks`` are at fault, if known."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))


class CollectiveTimeoutError(CommError):
    """Some ranks did not reach a collective in time: hung, stopped, or busy elsewhere. ``ranks`` names them."""


class PeerLostError(CommError):
    """The connection to some ranks broke: their processes died or closed the group. ``ranks`` names them."""


class CollectiveMismatchError(CommError):
    """The ranks called different collectives: operation, shape or dtype differ. ``ranks`` differ from the majority."""


Numbered = Callable[[CommError], CommError]  # turns an error of a subgroup into one with group-wide numbers


def renumbered(
    error: CommError, ranks: Sequence[int], where: str, rank: int, world_size: int, culprits: Collection[int] = ()
) -> CommError:
    """Convert ``error`` of a subgroup with these ``ranks``; ``culprits`` are group-wide ranks, by default those of the error."""
    culprits = culprits or [ranks[each] for each in error.ranks]
    return type(error)(
        f"rank {rank} lost {name_ranks(culprits)} of {world_size} {where}; from here on ranks "
        f"{', '.join(map(str, ranks))} are numbered from 0: {error}",
        culprits,
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for messages: ``rank 2`` or ``ranks 1 and 3``."""
    names = [str(rank) for rank in sorted(ranks)]
    if not names:
        return "an unknown rank"
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def unlike_most(calls: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose call differs from that of more than half of them; all ranks if there is no majority."""
    usual, count = Counter(calls.values()).most_common(1)[0]
    return [rank for rank, call in calls.items() if call != usual] if 2 * count > len(calls) else list(calls)
