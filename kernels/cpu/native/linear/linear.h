// Matrix products inside other kernels.
#pragma once
#include "../kernels.h"
#include "../numbers.h"

#if defined(__AMX_BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif

constexpr int64_t PANEL = WIDE ? 64 : 32;
// Outputs that a thread takes at a time. Matrix units end each run of outputs with a wait, so runs are longer where there are many.
INLINE int64_t outputs_at_once(int64_t num_outputs) { return UNITS && num_outputs >= 32 * PANEL ? 2 * PANEL : PANEL; }

// Rows of `kind`, contiguous, as tw_linear reads them: as they are, or widened to float32 or quantized in scratch memory of
// this thread. Sets `stride` to the bytes from row to row.
const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride);
