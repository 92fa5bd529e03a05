"""``LayerGroups``: layers that share a block table, which bounds the cache of layers with a window."""

from typing import NamedTuple, Self

import numpy as np

from tightwire.model.checkpoint.config import LlamaConfig

# Attention visits keys in tiles of up to this many, whose first is a multiple of their number; it masks those before a window.
_KEY_TILE = 64


class LayerGroups(NamedTuple):
    """The layers that attend to all tokens, and those with a window, in groups of as many layers as the rarer kind has.

    So a block takes the same memory in every group, and one pool serves all. A sequence has a block table per group; in those with
    a window it frees the blocks that no later token reads. Source: vLLM's hybrid KV cache manager.
    """

    places: tuple[tuple[int, int], ...] = ((0, 0),)  # each layer's group, and its number in the group
    num_full: int = 1  # groups without a window, which come first
    num_sliding: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: LlamaConfig, *, bounded: bool = True) -> Self:
        """Return the groups of the model; not ``bounded``: one group of all layers, whose windows only mask."""
        layers = range(config.num_layers)
        sliding = [layer for layer in layers if bounded and 0 < config.window_of(layer) < config.max_positions]
        full = [layer for layer in layers if layer not in sliding]
        size = min(len(kind) for kind in (full, sliding) if kind)
        num_full, num_sliding = (-(-len(kind) // size) for kind in (full, sliding))
        numbers = {layer: number for number, layer in enumerate(full)}
        numbers |= {layer: number for number, layer in enumerate(sliding, num_full * size)}
        places = tuple(divmod(numbers[layer], size) for layer in layers)
        return cls(places, num_full, num_sliding, config.window if sliding else 0)

    @property
    def num(self) -> int:
        return self.num_full + self.num_sliding

    @property
    def num_layers(self) -> int:
        """Layers of a group; the last group of a kind may have fewer."""
        return 1 + max(number for _, number in self.places)

    def first_block(self, position: int, block_size: int) -> int:
        """Return the first block that layers with a window read for tokens from ``position`` on."""
        return max(0, position + 1 - self.window) // _KEY_TILE * _KEY_TILE // block_size if self.window else 0

    def held(self, start_B: np.ndarray, end_B: np.ndarray, block_size: int) -> np.ndarray:
        """Return (L, B, M) bool: the entries of block tables that a step needs, whose tokens are [start, end)."""
        first_B = np.array([self.first_block(int(start), block_size) for start in start_B])
        block_M = np.arange(-(-end_B.max() // block_size))
        full_BM = block_M < -(-end_B // block_size)[:, None]
        sliding_BM = full_BM & (block_M >= first_B[:, None])
        return np.stack([full_BM] * self.num_full + [sliding_BM] * self.num_sliding)

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds, computed in steps of up to ``step_tokens``."""
        num_blocks = -(-num_tokens // block_size)
        return self.num_full * num_blocks + self.num_sliding * min(num_blocks, self._ring(step_tokens, block_size))

    def most_tokens(self, num_blocks: int, step_tokens: int, block_size: int) -> int:
        """Return the longest sequence that fits into ``num_blocks``."""
        blocks, ring = num_blocks // self.num, self._ring(step_tokens, block_size)
        if blocks >= ring and self.num_sliding:
            blocks = (num_blocks - self.num_sliding * ring) // self.num_full if self.num_full else 1 << 30
        return blocks * block_size

    def _ring(self, step_tokens: int, block_size: int) -> int:
        """Return the most blocks of a window, its first key tile and a step, wherever they begin."""
        return -(-(self.window + step_tokens + _KEY_TILE - 2) // block_size)
