"""The KV cache's blocks as numbers: which are free. Knows nothing of tensors or requests."""

from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks; every one is either free or has one owner."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        # A stack, lowest number on top: a small load touches a small part of the cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, all or none.

        Raises:
            ValueError: fewer are free; callers look at ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"asked for {count} blocks, {len(self._free)} of {self.num_blocks} are free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._owned[block] = 1
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is free already or does not exist; those before it are given back.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._owned[block]:
                raise ValueError(f"block {block} is freed, but nobody owns it (blocks are 0 to {self.num_blocks - 1})")
            self._owned[block] = 0
            self._free.append(block)
