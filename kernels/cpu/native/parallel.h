// Threads of torch's own OpenMP, and scratch memory that each thread keeps.
#pragma once
#include "kernels.h"

// A buffer of the calling thread, 64-byte aligned, kept between calls until the thread ends. Each `use` is a buffer of its own.
enum ScratchUse { WIDENED_WEIGHTS, PREPARED_ROWS, WEIGHT_TILES, ATTENTION, SCRATCH_USES };
float *thread_scratch(ScratchUse use, int64_t num_floats);
