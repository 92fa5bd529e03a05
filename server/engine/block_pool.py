"""Allocates the KV cache's blocks by number and counts their holders.

Several sequences with the same prefix may hold one block. A block without holders is free. A free block marked as kept
retains its content while other blocks can be allocated; the least recently used kept block is reused first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks with a count of holders for each."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        # A stack, lowest number on top, so that a small load touches a small part of the cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # kept and free, least recently used first
        self._kept = bytearray(num_blocks)
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return, kept ones included."""
        return len(self._blank) + len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, all or none; their content is lost.

        Raises:
            ValueError: fewer are free; callers check ``num_free`` first.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} of {self.num_blocks} are free")
        taken = [self._blank.pop() if self._blank else self._unused.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._kept[block] = 0
            self._num_holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these kept blocks."""
        for block in blocks:
            assert self._kept[block], "only a kept block has content to share"
            if not self._num_holders[block]:
                del self._unused[block]
            self._num_holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each. Kept blocks are reused in the order of ``blocks``.

        Raises:
            ValueError: a block is already free or does not exist; those before it have been freed.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._num_holders[block]:
                raise ValueError(f"block {block} is freed but has no holder (blocks are 0 to {self.num_blocks - 1})")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._kept[block]:
                self._unused[block] = None
            else:
                self._blank.append(block)

    def keep(self, block: int) -> None:
        """Mark a held block's content for reuse by others, even after it is free."""
        assert self._num_holders[block], "a free block has no content to keep"
        self._kept[block] = 1

    def is_kept(self, block: int) -> bool:
        """True if it still has the content that was marked."""
        return bool(self._kept[block])

    def spoil(self, blocks: Iterable[int]) -> None:
        """Unmark these held blocks: others must not use their content."""
        for block in blocks:
            assert self._num_holders[block], "only a held block can be spoiled"
            self._kept[block] = 0
