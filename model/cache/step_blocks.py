"""Which blocks of a cache one step needs, and the step with these alone, numbered 0 to N - 1."""

from dataclasses import dataclass, replace

import numpy as np

from tightwire.model.step_arrays import StepArrays


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """The blocks that a step reads or writes, each once. Its place is where it is found for the time of the step."""

    blocks_N: np.ndarray  # int32, ascending; a block's place is its index here
    read_I: np.ndarray  # places, ascending: what earlier steps left there this one reads
    written_J: np.ndarray  # places, ascending: they get keys and values of new tokens


def gather_blocks(step: StepArrays, block_size: int) -> tuple[StepArrays, StepBlocks]:
    """The step's blocks, and the step with places for blocks; table entries that no sequence needs become 0."""
    tables_BM = step.block_tables_BM
    query_lens_B = np.diff(step.query_start_B1)
    needed_BM = _first_blocks(step.context_lens_B, tables_BM, block_size)
    blocks_N, places_U = np.unique(tables_BM[needed_BM], return_inverse=True)
    places_BM = np.zeros_like(tables_BM)
    places_BM[needed_BM] = places_U
    read_BM = _first_blocks(step.context_lens_B - query_lens_B, tables_BM, block_size)
    block_T, offset_T = np.divmod(step.slots_T, block_size)
    place_T = np.searchsorted(blocks_N, block_T).astype(np.int32)
    blocks = StepBlocks(blocks_N, np.unique(places_BM[read_BM]), np.unique(place_T))
    return replace(step, slots_T=place_T * block_size + offset_T, block_tables_BM=places_BM), blocks


def runs_of(sources_I: np.ndarray, targets_I: np.ndarray) -> np.ndarray:
    """(R, 3) int64: first source, first target, count. Both ascend; where both go up by one together, a run goes on."""
    if not len(sources_I):
        return np.zeros((0, 3), np.int64)
    breaks = np.flatnonzero((np.diff(sources_I) != 1) | (np.diff(targets_I) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(sources_I)])))
    return np.stack((sources_I[starts], targets_I[starts], counts), axis=1).astype(np.int64)


def _first_blocks(num_tokens_B: np.ndarray, tables_BM: np.ndarray, block_size: int) -> np.ndarray:
    """(B, M) bool: the entries for each sequence's first so many tokens."""
    return np.arange(tables_BM.shape[1]) < -(-num_tokens_B // block_size)[:, None]
