// Products of packed weights with activations in 8 bits.
#pragma once
#include "linear.h"

// tw_linear for an integer kind of weights (formats.h). `x` holds rows of quantize_rows.
void multiply_int8(const tw_linear_args &args, int64_t start, int64_t stop);
int64_t quantized_bytes(int64_t depth);  // of a row
void quantize_rows(char *target, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth, int64_t kind);
