"""The KV cache's blocks as numbers: who holds which, and which are free. Knows nothing of tensors or requests.

A block may be held by several sequences that begin alike. One that nobody holds is free; if what it holds may be of use
again it is kept as it is for as long as there are others to hand out, the longest unused goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks, each with the number of its holders."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        # A stack, lowest number on top: a small load touches a small part of the cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # kept and free, the longest unused first
        self._kept = bytearray(num_blocks)
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could hand out, kept ones among them."""
        return len(self._blank) + len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, all or none; what they held is lost.

        Raises:
            ValueError: fewer are free; callers look at ``num_free`` first.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} of {self.num_blocks} are free")
        taken = [self._blank.pop() if self._blank else self._unused.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._kept[block] = 0
            self._num_holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more hold of kept blocks."""
        for block in blocks:
            assert self._kept[block], "only what is kept is known to hold something"
            if not self._num_holders[block]:
                del self._unused[block]
            self._num_holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one hold of each. Of those that are kept the first ones will be handed out first.

        Raises:
            ValueError: a block is free already or does not exist; those before it are given back.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._num_holders[block]:
                raise ValueError(f"block {block} is freed, but nobody owns it (blocks are 0 to {self.num_blocks - 1})")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._kept[block]:
                self._unused[block] = None
            else:
                self._blank.append(block)

    def keep(self, block: int) -> None:
        """What this block, which somebody holds, has in it may be of use to others, now and after it is free."""
        assert self._num_holders[block], "a free block has nothing to keep"
        self._kept[block] = 1

    def is_kept(self, block: int) -> bool:
        """Whether it still has in it what it had when it was to be kept."""
        return bool(self._kept[block])

    def spoil(self, blocks: Iterable[int]) -> None:
        """What these blocks, which somebody holds, have in them is of no use to others."""
        for block in blocks:
            assert self._num_holders[block], "a free block is spoiled by handing it out"
            self._kept[block] = 0
