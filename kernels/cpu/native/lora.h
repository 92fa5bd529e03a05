// Low-rank adapters inside other kernels.
#pragma once
#include "kernels.h"

// Outputs of A that a thread takes at a time.
constexpr int64_t SHRINK_OUTPUTS = 16;

// Items of tw_adapter_shrink: each run of rows has the same number.
static inline int64_t shrink_items(const tw_adapter_args &args) {
    return args.num_runs * ((args.site->most_width + SHRINK_OUTPUTS - 1) / SHRINK_OUTPUTS);
}
// Asks for the panels of B that tw_adapter_expand reads for these outputs.
void prefetch_expand(const tw_adapter_args &args, int64_t start, int64_t stop);
