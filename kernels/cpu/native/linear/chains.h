// Products of several rows on registers of four or eight lanes (chains.cpp).
#pragma once
#include "formats.h"
#include "linear.h"

// Whether that many rows take less time so than in tiles whose lanes are inputs.
INLINE bool in_chains(int64_t num_rows, int64_t weight_kind) { return !WIDE && num_rows >= (is_packed(weight_kind) ? 4 : 24); }

// Bytes of sixteen rows of `depth` inputs as a panel.
int64_t chains_bytes(int64_t depth);
// Rows of `kind` as panels.
void make_chains(char *panels, const char *rows, int64_t stride, int64_t num_rows, int64_t depth, int64_t kind);
// tw_linear of rows in panels.
void multiply_chains(const tw_linear_args &args, int64_t start, int64_t stop);
