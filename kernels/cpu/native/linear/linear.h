// Matrix products inside other kernels.
#pragma once
#include "../kernels.h"
#include "formats.h"

// Outputs that a thread takes at a time.
constexpr int64_t PANEL = WIDE ? 64 : 32;

// Contiguous rows of `kind` as tw_linear reads them: as they are, or what tw_prepare_rows makes of them, in scratch memory of
// this thread. Sets `stride` to tw_prepared_stride().
const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride);

// The bias of up to sixteen outputs from `first` on; not called without a bias.
INLINE F32 load_bias(const tw_linear_args &args, int64_t first, int64_t count) {
    return with_kind(args.bias_kind, [&]<class Number>(Number) {
        return load_numbers<Number>((const char *)args.bias + Number::size * first, count);
    });
}
// Rounds sums (rows, WIDTH), whose first row and column are `token` and `first` of the product, and writes them.
template <int64_t WIDTH = PANEL>
INLINE void write_sums(const tw_linear_args &args, const float *sums, int64_t rows, int64_t columns, int64_t token,
                       int64_t first) {
    with_kind(args.kind, [&]<class Number>(Number) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t at = 0; at < columns; at += LANES) {
                F32 value = load(sums + row * WIDTH + at);
                if (args.bias) value = value + load_bias(args, first + at, columns - at);
                char *out = (char *)args.out + Number::size * ((token + row) * args.num_outputs + first + at);
                store_numbers<Number>(out, value, columns - at);
            }
    });
}

// int8_activations.cpp: tw_linear for an integer kind of weights (formats.h). `x` holds rows of quantize_rows.
void multiply_int8(const tw_linear_args &args, int64_t start, int64_t stop);
int64_t quantized_bytes(int64_t depth);  // of a row
void quantize_rows(char *target, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth, int64_t kind);

// chains.cpp: products of several rows on registers of four or eight lanes.
// Whether that many rows take less time so than in tiles whose lanes are inputs.
INLINE bool in_chains(int64_t num_rows, int64_t weight_kind) { return !WIDE && num_rows >= (is_packed(weight_kind) ? 4 : 24); }
int64_t chains_bytes(int64_t depth);  // of sixteen rows of `depth` inputs as a panel
// Rows of `kind` as panels.
void make_chains(char *panels, const char *rows, int64_t stride, int64_t num_rows, int64_t depth, int64_t kind);
// tw_linear of rows in panels.
void multiply_chains(const tw_linear_args &args, int64_t start, int64_t stop);
