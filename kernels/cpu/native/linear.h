// Matrix products inside other kernels.
#pragma once
#include "kernels.h"
#include "numbers.h"

// Outputs that a thread takes at a time.
constexpr int64_t PANEL = WIDE ? 64 : 32;

// The bias of up to sixteen outputs from `first` on; not called without a bias.
INLINE F32 load_bias(const tw_linear_args &args, int64_t first, int64_t count) {
    return with_kind(args.bias_kind, [&](auto number) {
        using Number = decltype(number);
        return load_numbers<Number>((const char *)args.bias + Number::size * first, count);
    });
}

// Rows of `kind`, contiguous, as tw_linear reads them: as they are, or widened to float32 or quantized in scratch memory of
// this thread. Sets `stride` to the bytes from row to row.
const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride);
