"""The limits of one engine: sequences, tokens and cache blocks."""

from dataclasses import dataclass

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
    max_step_blocks: int | None = None  # distinct blocks of all sequences of a step; None: no limit

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}; "
                "running sequences could not all take a step"
            )
        num_blocks = min(self.num_blocks, self.max_step_blocks or self.num_blocks)
        if (held := num_blocks * self.block_size) < self.max_model_len:
            raise ValueError(
                f"a step holds {num_blocks} blocks of {self.block_size} = {held} tokens, less than one sequence of "
                f"max_model_len={self.max_model_len}; set --max-model-len to at most {held}"
            )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
