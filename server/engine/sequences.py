"""Owns one replica's waiting and running sequences and their KV-cache blocks: admits, grows, preempts, removes."""

from array import array
from collections import deque

from tightwire.server.config.limits import Limits
from tightwire.server.engine.blocks import BlockPool, PrefixCache
from tightwire.server.engine.request import Request
from tightwire.server.ipc.engine_stats import EngineCounters, ReplicaLoad


class Sequences:
    """``waiting`` and ``running`` are oldest first; every running sequence is older than every waiting one."""

    def __init__(self, limits: Limits, counters: EngineCounters) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.prefixes = PrefixCache(self.pool, limits, counters)
        self.waiting, self.running = deque[Request](), list[Request]()
        self._num_waiting_tokens = 0
        self._limits, self._counters = limits, counters

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(len(self.running), len(self.waiting), self.pool.num_blocks, self.pool.num_free)

    @property
    def num_to_compute(self) -> int:
        """Known tokens left to compute, including cached tokens of waiting sequences."""
        return self._num_waiting_tokens + sum(request.num_to_compute for request in self.running)

    def add(self, request: Request) -> None:
        """Queue a sequence whose prompt and max_tokens fit max_model_len."""
        self.waiting.append(request)
        self._num_waiting_tokens += len(request.token_ids)

    def remove(self, request: Request, *, spoiled: bool = False) -> None:
        """Remove a sequence that ended; its blocks are free at once. ``spoiled``: others must not share them."""
        is_running = request in self.running
        self._num_waiting_tokens -= 0 if is_running else len(request.token_ids)
        (self.running if is_running else self.waiting).remove(request)
        if spoiled:
            self.prefixes.forget(request)
        else:
            self.prefixes.enter(request, request.num_computed)  # a block may have been filled by a deferred token
        self._free(request)

    def admit(self, policy: int) -> None:
        """Start waiting sequences of this policy, in order, while they fit."""
        wanted = sum(self._blocks_soon(request) - self._num_held(request) for request in self.running if self.waiting)
        while self.waiting and self.waiting[0].policy == policy and len(self.running) < self._limits.max_num_seqs:
            if self.running and wanted >= self.pool.num_free:
                return
            request = self.waiting[0]
            num_cached = self.advance(request)
            wanted += self._blocks_soon(request) - self._num_held(request)
            # A sequence that runs alone always fits.
            if self.running and (wanted > self.pool.num_free or not self._fits_in_a_step(request)):
                self._free(request)
                return
            self.running.append(self.waiting.popleft())
            self._num_waiting_tokens -= len(request.token_ids)
            self.prefixes.count_hits(request, num_cached)
            self.prefixes.count_query(request)

    def advance(self, request: Request) -> int:
        """Skip its tokens that the prefix cache has; returns how many."""
        num_cached = self.prefixes.advance(request)
        self._free_passed(request)
        return num_cached

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for its next tokens, and free those that they do not read; False if too few are free."""
        self._free_passed(request)
        missing = self._limits.blocks_for(request.num_computed + num_tokens) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.blocks.extend(self.pool.allocate(missing))
        return True

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.was_preempted = True
        self.waiting.appendleft(request)
        self._num_waiting_tokens += len(request.token_ids)
        self._counters.num_preemptions += 1

    def _free(self, request: Request) -> None:
        # Reversed, so that the ends of cached prompts are evicted first.
        self.pool.free(block for block in reversed(request.blocks) if block >= 0)
        del request.blocks[:]
        request.num_computed = request.num_passed_blocks = request.num_entered_blocks = 0
        request.epoch += 1

    def _free_passed(self, request: Request) -> None:
        groups = self._limits.groups
        first = self._limits.first_block(request.num_computed) if groups.num_sliding else 0
        for index in range(request.num_passed_blocks, first):
            passed = slice(index * groups.num + groups.num_full, (index + 1) * groups.num)
            self.pool.free(block for block in request.blocks[passed] if block >= 0)
            request.blocks[passed] = array("i", [-1]) * groups.num_sliding
            request.num_passed_blocks = index + 1

    def _num_held(self, request: Request) -> int:
        return len(request.blocks) - self._limits.groups.num_sliding * request.num_passed_blocks

    def _fits_in_a_step(self, request: Request) -> bool:
        """True if ``request`` and all running sequences can take part in one step, now and soon."""
        if self._limits.max_step_blocks is None:
            return True
        together = [*self.running, request]
        blocks = {block for each in together for block in each.blocks}
        growth = sum(self._blocks_soon(each) - self._num_held(each) for each in together)
        return len(blocks) + growth <= self._limits.max_step_blocks

    def _blocks_soon(self, request: Request) -> int:
        """The blocks that its tokens need, and one more: else a preempted sequence would return and soon be preempted again."""
        limits = self._limits
        num_tokens = min(len(request.token_ids) + limits.block_size, limits.max_model_len)
        before = max(request.num_computed, num_tokens - limits.max_step_tokens)
        freed = limits.groups.num_sliding * limits.first_block(before)
        return max(self._num_held(request), limits.blocks_for(num_tokens) - freed)
