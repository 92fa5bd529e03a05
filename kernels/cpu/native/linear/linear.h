// Matrix products inside other kernels.
#pragma once
#include "../kernels.h"
#include "../numbers.h"

// Outputs that a thread takes at a time.
constexpr int64_t PANEL = WIDE ? 64 : 32;

// Rows of `kind`, contiguous, as tw_linear reads them: as they are, or widened to float32 or quantized in scratch memory of
// this thread. Sets `stride` to the bytes from row to row.
const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride);
