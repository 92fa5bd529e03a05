"""The limits of one engine: sequences, tokens and cache blocks."""

from dataclasses import dataclass, field

from tightwire.model.layer_groups import LayerGroups
from tightwire.server.config.chunks import ChunkSizes

# Prompt rows per step whose logits are requested: 50 MB for a vocabulary of 49152, counted in the memory budget.
MAX_SCORED_ROWS = 256
BLOCK_SIZE = 16  # tokens of a KV cache block
MAX_BODY_BYTES = 4 << 20  # of a request


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """All are known once the cache is allocated."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    max_scored_rows: int = MAX_SCORED_ROWS
    max_drafting_seqs: int = 16  # a step with more sequences drafts no tokens
    prefix_cache: str = "prompts"  # what the prefix cache shares: none, prompts, or all (answers too)
    num_stages: int = 1  # that prompts pass; 1: all ranks compute prompts together
    pipeline: bool = False  # all rows pass the stages
    chunks: ChunkSizes = field(default_factory=ChunkSizes)  # of prompts that pass stages; learns while running
    num_policies: int = 1  # the prompts of later ones are computed by all ranks together
    max_step_blocks: int | None = None  # distinct blocks of all sequences of a step; None: no limit
    groups: LayerGroups = field(default_factory=LayerGroups)  # of layers, each with a block table; by default one
    max_parts: int = 1  # parts of ``max_num_batched_tokens`` that a step may have

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            both = f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}"
            raise ValueError(f"{both}; running sequences could not all take a step")
        num_blocks = min(self.num_blocks, self.max_step_blocks or self.num_blocks)
        if (held := self.groups.most_tokens(num_blocks, self.max_step_tokens, self.block_size)) < self.max_model_len:
            too_few = f"a step holds {num_blocks} blocks of {self.block_size} = {held} tokens, less than one sequence"
            raise ValueError(f"{too_few} of max_model_len={self.max_model_len}; set --max-model-len to at most {held}")

    @property
    def max_step_tokens(self) -> int:
        return self.max_num_batched_tokens * self.max_parts

    def blocks_for(self, num_tokens: int) -> int:
        """The entries of a sequence's block tables for its first tokens, those of freed blocks included."""
        return self.groups.num * -(-num_tokens // self.block_size)

    def first_block(self, num_computed: int) -> int:
        """The first block that layers with a window still read."""
        return self.groups.first_block(num_computed, self.block_size)
