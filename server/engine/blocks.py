"""The KV cache's blocks: allocation by number with a count of holders, and sharing of common prefixes.

A free block marked as kept retains its content while other blocks can be allocated; then the least recently used one is
evicted. A block's key is a digest (BLAKE2b, 256 bits) of its tokens and the key of the block before it, so no prompt can be
crafted to match another's blocks. The first block's key also holds the AllReduce policy, the request's salt, because a
client that times answers can detect earlier prompts, and the id of the LoRA adapter, which a reload changes.

Each group of layers has its own blocks. A prefix is cached if the groups without a window have all its blocks, and those with a
window the blocks that the next token reads.

Blocks of generated tokens are cached only if ``prefix_cache`` is "all" (docs/serving.md). A block is entered when the
step that fills it is planned: each layer writes all keys and values of a step before it reads any.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from tightwire.server.config.limits import Limits
from tightwire.server.engine.request import Request
from tightwire.server.ipc.engine_stats import EngineCounters


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        # A stack, lowest number on top, so that a small load touches a small part of the cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # kept and free, least recently used first
        self._kept, self._num_holders = bytearray(num_blocks), [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return, kept ones included."""
        return len(self._blank) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, and evict the content of kept ones once no other is free. ValueError: fewer are free."""
        if not 0 <= count <= self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} of {self.num_blocks} are free")
        taken = [self._blank.pop() if self._blank else self._evictable.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._kept[block] = 0
            self._num_holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._kept[block], "only a kept block has content to share"
            if not self._num_holders[block]:
                del self._evictable[block]
            self._num_holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each. Kept blocks are evicted in the order of ``blocks``. ValueError: a block has no holder."""
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._num_holders[block]:
                raise ValueError(f"block {block} is freed but has no holder (blocks are 0 to {self.num_blocks - 1})")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._kept[block]:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def keep(self, block: int) -> None:
        """Mark a held block's content for reuse by others, even after it is free."""
        assert self._num_holders[block], "a free block has no content to keep"
        self._kept[block] = 1

    def is_kept(self, block: int) -> bool:
        return bool(self._kept[block])


class PrefixCache:
    """Entries for the cached blocks of one pool, at most one per block. Cost: about 0.3 kB per entry, 1 us per block of a prompt."""

    def __init__(self, pool: BlockPool, limits: Limits, counters: EngineCounters) -> None:
        self._pool, self._limits, self._counters = pool, limits, counters
        self._block_size, self._groups = limits.block_size, limits.groups
        self._enabled, self._with_answers = limits.prefix_cache != "none", limits.prefix_cache == "all"
        self._block_of: dict[tuple[bytes, int], int] = {}  # by key and group
        self._key_of: list[tuple[bytes, int]] = [(b"", 0)] * pool.num_blocks

    def advance(self, request: Request) -> int:
        """Skip the cached tokens of ``request``, except the last token, whose logits are needed; returns how many."""
        before, start, stop = request.num_computed, request.num_entered_blocks, self._find_end(request)
        passed, size = self._limits.first_block(stop * self._block_size), self._groups.num
        for index in range(start, stop):
            key = self._key(request, index)
            wanted = size if index >= passed else self._groups.num_full
            found = [self._block_of[key, group] if group < wanted else -1 for group in range(size)]
            self._pool.share(found[:wanted])
            own = slice(index * size, (index + 1) * size)
            self._pool.free(request.blocks[own])
            request.blocks[own] = array("i", found)
        if stop > start:
            request.num_computed, request.num_entered_blocks = stop * self._block_size, stop
        return request.num_computed - before

    def num_cached(self, request: Request) -> int:
        """The number of tokens that ``advance`` would skip for ``request``, which has not started."""
        return self._find_end(request) * self._block_size

    def next_key(self, request: Request) -> bytes | None:
        """The key of the block that ``request`` computes next; None if it cannot be shared."""
        index = request.num_entered_blocks
        return self._key(request, index) if index < self._num_shareable(request) else None

    def count_query(self, request: Request) -> None:
        """Count a request that starts for the first time. ``count_hits`` counts its hits, now and later."""
        if self._enabled and request.prompt_logprobs is None and not request.was_preempted:
            self._counters.num_prefix_queried_tokens += request.num_prompt_tokens

    def count_hits(self, request: Request, num_tokens: int) -> None:
        if not request.was_preempted:
            request.num_cached_tokens += num_tokens
            self._counters.num_prefix_hit_tokens += num_tokens

    def enter(self, request: Request, num_tokens: int) -> None:
        """Let others share, after the next step, the blocks that ``num_tokens`` fill; one with a deferred token a step later."""
        if not self._enabled:
            return
        num_tokens = min(num_tokens, request.num_known if self._with_answers else request.num_prompt_tokens)
        for index in range(request.num_entered_blocks, num_tokens // self._block_size):
            blocks = request.blocks[index * self._groups.num : (index + 1) * self._groups.num]
            for group, block in enumerate(blocks):
                key = self._key(request, index), group
                if block >= 0 and self._find(key) is None:
                    old_key = self._key_of[block]
                    if self._block_of.get(old_key) == block:
                        del self._block_of[old_key]  # the block has been allocated again since
                    self._block_of[key], self._key_of[block] = block, key
                    self._pool.keep(block)
            request.num_entered_blocks = index + 1

    def forget(self, request: Request) -> None:
        """Let others share none of the blocks of ``request``, nor those that it freed."""
        for key in request.prefix_keys:
            for group in range(self._groups.num):
                self._block_of.pop((key, group), None)

    def _find_end(self, request: Request) -> int:
        """The number of blocks, from the first, of the longest prefix of ``request`` that it or the cache has."""
        end, complete = request.num_entered_blocks, 0  # from block ``complete`` on, groups with a window have all
        for index in range(end, self._num_shareable(request)):
            key = self._key(request, index)
            found = [self._find((key, group)) is not None for group in range(self._groups.num)]
            if not all(found[: self._groups.num_full]):
                break
            if not all(found):
                complete = index + 1
            if complete <= self._limits.first_block((index + 1) * self._block_size):
                end = index + 1
        return end

    def _num_shareable(self, request: Request) -> int:
        """The number of blocks that ``request`` may take from others."""
        if not self._enabled or request.prompt_logprobs is not None:  # scoring needs the logits of every token
            return 0
        num_tokens = len(request.token_ids) - 1
        # A preempted sequence recomputes its generated tokens with their own kernels, after a prompt's row of its own: others may still compute the rest.
        if not self._with_answers:
            num_tokens = min(num_tokens, request.num_prompt_tokens - 1)
        return num_tokens // self._block_size

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.prefix_keys
        if not keys:
            keys.append(repr((request.policy, request.cache_salt, request.adapter)).encode())
        while len(keys) <= index + 1:
            start = (len(keys) - 1) * self._block_size
            tokens = array("i", request.token_ids[start : start + self._block_size])
            keys.append(blake2b(keys[-1] + tokens.tobytes(), digest_size=32).digest())
        return keys[index + 1]

    def _find(self, key: tuple[bytes, int]) -> int | None:
        block = self._block_of.get(key)
        return block if block is not None and self._pool.is_kept(block) else None
