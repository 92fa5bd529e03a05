"""Sequences that begin alike share the blocks of their common beginning: it is computed once.

A block is found by what is in it and by all that comes before: its key is the number of the entry for the block before
it, and its own tokens. Keys are compared, not hashes of them, so no prompt can be made to meet another's blocks. The
first block's key begins with the arm and the request's salt: keys and values depend on what summed them, and salted
requests share with their like alone (whoever can time answers can tell what has been asked before).

Kept are the prompts' blocks, whose numbers are the same bits in whatever company a prompt is computed (on a CPU, with an
AllReduce that promises it: docs/architecture.md, "The same text whatever else runs"); so a hit changes nothing in the
answer. Generated tokens may go through other kernels and another AllReduce than prompts do: their blocks
are kept only where that was asked for.

A block is entered when the step that fills it is planned: within each layer all keys and values of a step are written
before any are read, so sequences of one step may share.
"""

from array import array
from collections.abc import Hashable
from itertools import count

from tightwire.server.engine.block_pool import BlockPool
from tightwire.server.engine.request import Request
from tightwire.server.ipc.engine_stats import EngineCounters


class PrefixCache:
    """Entries for the kept blocks of one pool, at most one a block. Cost: about 0.3 kB an entry."""

    def __init__(
        self, pool: BlockPool, block_size: int, *, counters: EngineCounters, with_answers: bool = False
    ) -> None:
        self._counters = counters
        self._pool, self._block_size, self._with_answers = pool, block_size, with_answers
        self._block_of: dict[Hashable, int] = {}
        self._key_of: list[Hashable] = [None] * pool.num_blocks
        self._entry_of = [0] * pool.num_blocks  # its number, never given twice
        self._numbers = count(1)

    def advance(self, request: Request) -> int:
        """Let ``request`` go on behind all that is kept of it, as it begins or as others have computed it since.

        But for the last token, whose logits are needed. Gives the number of tokens that it need not compute.
        """
        before, prefix = request.num_computed, request.prefix or _root(request)
        for index in range(request.num_entered_blocks, self._num_to_share(request)):
            block = self._find(self._key(request, index, prefix))
            if block is None:
                break
            self._pool.share([block])
            if index < len(request.blocks):
                self._pool.free([request.blocks[index]])
                request.blocks[index] = block
            else:
                request.blocks.append(block)
            prefix = self._entry_of[block]
            request.num_computed = (index + 1) * self._block_size
            request.num_entered_blocks, request.prefix = index + 1, prefix
        return request.num_computed - before

    def num_kept(self, request: Request) -> int:
        """How many tokens of ``request``, which has not begun, ``advance`` would spare it now."""
        prefix = _root(request)
        for index in range(num_blocks := self._num_to_share(request)):
            block = self._find(self._key(request, index, prefix))
            if block is None:
                return index * self._block_size
            prefix = self._entry_of[block]
        return num_blocks * self._block_size

    def next_key(self, request: Request) -> Hashable:
        """What the block will be known by that ``request`` computes next; None when it is none to share."""
        index = request.num_entered_blocks
        if index >= self._num_to_share(request):
            return None
        return self._key(request, index, request.prefix or _root(request))

    def count_query(self, request: Request) -> None:
        """Count a request that begins, with what it finds then and later (``count_hits``)."""
        if request.prompt_logprobs is None:
            self._counters.num_prefix_queried_tokens += request.num_prompt_tokens

    def count_hits(self, request: Request, num_tokens: int) -> None:
        request.num_cached_tokens += num_tokens
        self._counters.num_prefix_hit_tokens += num_tokens

    def enter(self, request: Request, num_tokens: int) -> None:
        """After the next step ``num_tokens`` of ``request`` are computed: others may share the blocks they fill.

        But for one that holds a token which nobody knows yet: the step after has it entered.
        """
        num_tokens = min(num_tokens, request.num_known if self._with_answers else request.num_prompt_tokens)
        prefix = request.prefix or _root(request)
        for index in range(request.num_entered_blocks, num_tokens // self._block_size):
            key = self._key(request, index, prefix)
            block = self._find(key)
            if block is None:
                block = request.blocks[index]
                self._enter(block, key)
            prefix = self._entry_of[block]
            request.num_entered_blocks = index + 1
        request.prefix = prefix

    def _num_to_share(self, request: Request) -> int:
        """How many blocks ``request`` may have from others."""
        if request.prompt_logprobs is not None:
            return 0  # every token's logits are needed
        num_tokens = len(request.token_ids) - 1
        if not self._with_answers:  # of a preempted one, generated tokens stay what their own kernels make of them
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        return num_tokens // self._block_size

    def _key(self, request: Request, index: int, prefix: Hashable) -> Hashable:
        start = index * self._block_size
        return prefix, array("i", request.token_ids[start : start + self._block_size]).tobytes()

    def _find(self, key: Hashable) -> int | None:
        block = self._block_of.get(key)
        return block if block is not None and self._pool.is_kept(block) else None

    def _enter(self, block: int, key: Hashable) -> None:
        old_key = self._key_of[block]
        if self._block_of.get(old_key) == block:
            del self._block_of[old_key]  # the block was handed out since
        self._block_of[key] = block
        self._key_of[block], self._entry_of[block] = key, next(self._numbers)
        self._pool.keep(block)


def _root(request: Request) -> Hashable:
    return request.arm, request.cache_salt
