// The C interface of the CPU kernels. Python reads this file too (library.py): declarations in plain C only.
//
// A kernel is a function of its arguments and a range of items (rows, panels, groups), which `tw_run` spreads over
// threads. Items do not depend on each other. Addresses are a tensor's data_ptr(); strides are bytes; a `kind` is a
// number of NUMBER_KIND (numbers.h) or of a packed format. Nothing is checked: callers check first.
#ifndef TIGHTWIRE_KERNELS_H
#define TIGHTWIRE_KERNELS_H
#include <stdint.h>
#ifdef __cplusplus
#define TW_API extern "C" __attribute__((visibility("default")))
#else
#define TW_API
#endif

typedef uintptr_t address;
typedef void (*tw_kernel)(const void *arguments, int64_t start, int64_t stop);

// --- library and threads --------------------------------------------------------------------------------------------

// Hash of the sources that the library was built from; library.py looks for its text in the file.
TW_API const char *tw_source_hash(void);
// Use this GOMP_parallel, the one of the OpenMP that torch has loaded, for every parallel region.
TW_API void tw_set_parallel(address gomp_parallel);
// Run a kernel over items 0 to num_items on `num_threads` threads, which draw `step` items at a time. Returns when all are done.
TW_API void tw_run(tw_kernel kernel, const void *arguments, int64_t num_items, int64_t step, int64_t num_threads);

// --- rows.cpp: one pass per row -------------------------------------------------------------------------------------

// total = scale * x + residual, out = rms_norm(total) * (offset + weight); without a residual `total` and `residual` are 0, and
// x is normalized. With `x_weight`, x becomes rms_norm(x) * (offset + x_weight) first; without `weight`, out = total. `out` and
// weights are of `kind`; x, residual and total are of `sum_kind`: float32 or `kind`.
typedef struct {
    address out, total, x, residual, weight;
    int64_t x_stride, residual_stride, size, kind, sum_kind;
    double eps, offset, scale;
    address x_weight;
} tw_norm_args;
TW_API void tw_norm(const void *norm_args, int64_t start, int64_t stop);

// RMS norms of q and k. Without weights (0) there are none. They apply to each head, or, if `whole`, to all heads together, whose
// mean squares (T, 2) float32 are given, or 0: those of the row's own heads.
typedef struct {
    address q_weight, k_weight, mean_squares;
    int64_t whole;
    double eps, offset;
} tw_head_norms;
// Rotate the first 2 half numbers of the query and key heads of qkv (T, H + 2 K, E), write queries to `queries` (T, H, E), and keys
// and values to their slots of the caches (N, K, P, E) of `cache_kind`. Cosines and sines are (T, half) float32, slots int32 and
// inside the caches. With norms, or if the kinds differ, the queries and keys of qkv are overwritten.
typedef struct {
    address queries, qkv, cos, sin, k_cache, v_cache, slots;
    int64_t token_stride, head_stride, cos_stride, sin_stride, cache_block_stride;
    int64_t num_heads, num_kv_heads, half, head_dim, tokens_per_block, kind, cache_kind;
    tw_head_norms norms;
} tw_rotate_args;
TW_API void tw_rotate_and_cache(const void *rotate_args, int64_t start, int64_t stop);

// out (T, width) = silu(gate) * up of rows [gate, up], or gelu(gate) * up, by tanh.
typedef struct {
    address out, gate_up;
    int64_t row_stride, width, kind, gelu;
} tw_swiglu_args;
TW_API void tw_swiglu(const void *swiglu_args, int64_t start, int64_t stop);

// Copy runs of rows; `runs` is (R, 3) int64: first source row, first target row, number of rows.
TW_API void tw_copy_runs(address target, address source, address runs, int64_t num_runs, int64_t row_bytes);

// One sortable int64 key for each row's best number (candidates of greedy sampling).
TW_API void tw_best_keys(address keys, address x, int64_t stride, int64_t num_rows, int64_t num_columns, int64_t first_id);

// --- linear: matrix products ----------------------------------------------------------------------------------------

// The second matrix (O, D) of a gated product, and its bias or 0.
typedef struct {
    address weight, bias;
    int64_t weight_stride, weight_kind, gelu;
} tw_up_args;
// out (T, O) = x (T, D) @ weight (O, D)^T + bias; with `up`, silu or gelu of that, rounded, times x @ up^T + bias, rounded. `out`
// is of `kind`. `x` holds rows of tw_prepare_rows, tw_prepared_stride() apart, which were bfloat16 if `in_pairs`. Items are
// outputs, of which a thread draws tw_outputs_at_once().
typedef struct {
    address out, x, weight, bias;
    int64_t x_stride, weight_stride, weight_kind, num_tokens, num_outputs, num_inputs, kind, bias_kind, in_pairs;
    const tw_up_args *up;
} tw_linear_args;
TW_API void tw_linear(const void *linear_args, int64_t start, int64_t stop);
// The fewest rows of bfloat16 that may have an `up`: those that matrix units multiply in blocks. 0: none may.
TW_API int64_t tw_gated_rows(void);
// A panel, or an even share for matrix units with many rows: what a thread reads of x stays in its cache.
TW_API int64_t tw_outputs_at_once(const void *linear_args, int64_t num_threads);
TW_API int64_t tw_panel(void);
// Whether bfloat16 numbers are multiplied in pairs (AVX512-BF16).
TW_API int64_t tw_has_pairs(void);
// Rows of x of `kind` as tw_linear reads them: quantized for an integer kind of weights, in tiles for matrix units, in panels for
// chains.cpp, else widened; in tw_prepared_bytes(), which is 0 if x is read as it is. `num_outputs` decides whether matrix units
// read many rows in tiles. Items are sixteens of rows.
typedef struct {
    address out, x;
    int64_t x_stride, num_rows, num_inputs, num_outputs, kind, weight_kind;
} tw_rows_args;
TW_API int64_t tw_prepared_bytes(const void *rows_args);
TW_API int64_t tw_prepared_stride(const void *rows_args);
TW_API void tw_prepare_rows(const void *rows_args, int64_t start, int64_t stop);

// Packed rows to plain numbers of `out_kind`, contiguous in `out`: row i of `out` is row i of the `num_rows`, or row
// indices[i] (int64).
typedef struct {
    address out, blocks, indices;
    int64_t out_kind, kind, row_stride, num_rows, num_groups;
} tw_unpack_args;
TW_API void tw_unpack(const void *unpack_args, int64_t start, int64_t stop);

// Interleave sixteens of contiguous packed rows in place. Items are sixteens.
typedef struct {
    address blocks;
    int64_t kind, num_groups;
} tw_interleave_args;
TW_API void tw_interleave(const void *interleave_args, int64_t start, int64_t stop);

// --- attention/: paged causal attention ------------------------------------------------------------------------------

// Some tokens of one sequence, attended together.
typedef struct {
    int64_t seq, first_row, num_tokens;
} tw_tile;
// Cuts packed rows into tiles of at most `tile_tokens`, costliest first. `tiles` has room for
// num_tokens / tile_tokens + num_seqs. Index tensors are int32.
typedef struct {
    address query_start, context_lens, block_table, tiles;
    int64_t num_seqs, num_tokens, tile_tokens, table_stride, max_blocks, num_blocks, tokens_per_block;
    int64_t num_tiles, num_keys;  // results; num_keys counts the keys that the tiles visit in all
} tw_plan_args;
// Returns -1, or the first sequence whose lengths or blocks are impossible (num_seqs: the queries do not cover the rows).
TW_API int64_t tw_plan_tiles(tw_plan_args *plan);

// What keys lack in the cache: a bias (K, E) to be turned to each position by cosines and sines (positions, half), all float32.
typedef struct {
    address bias, cos, sin;
    int64_t half;
} tw_key_bias;
// Items are (tile, KV head) pairs in the order of `tiles`. `out` is contiguous and of q's `kind`; the caches are (N, K, P, E),
// each block contiguous. The first `skipped_heads` query heads of the first KV head are not in q. A row attends to the last
// `window` keys up to its own, or to all (0). Scores become cap * tanh(score / cap) unless `cap_log2`, cap * log2(e), is 0.
typedef struct {
    address out, q, k_cache, v_cache, query_start, context_lens, block_table, tiles;
    int64_t q_token_stride, q_head_stride, kind, cache_block_stride, cache_kind, table_stride, tokens_per_block;
    int64_t num_heads, num_kv_heads, heads_per_kv_head, skipped_heads, head_dim;
    double scale_log2, cap_log2;
    int64_t window;
    tw_key_bias key_bias;  // its `bias` may be 0
} tw_attend_args;
TW_API void tw_attend(const void *attend_args, int64_t start, int64_t stop);

// --- shared_sums.cpp: sums over processes that share memory ------------------------------------------------------------

// Where a process's line of words and its two buffers are, in the memory of the process that asks.
typedef struct {
    address line, buffers[2];
} tw_place;
// `own` is the calling process's index in `places`. A turn writes at most `chunk_bytes` (a multiple of 64) into a buffer.
typedef struct {
    int64_t own, num_processes;
    int64_t num_spins, num_naps;  // looks at another's turn before the core is offered to others; sleeps before giving up
    int64_t chunk_bytes;
    tw_place places[];
} tw_board;
// Store the call and the number of this process's next turn: its buffer is written.
TW_API void tw_publish(const tw_board *board, int64_t turn, int64_t call);
// Whether `process`, or all, have published `turn`, after a bounded wait: 1 or 0.
TW_API int64_t tw_wait_for(const tw_board *board, int64_t process, int64_t turn);
TW_API int64_t tw_wait_for_all(const tw_board *board, int64_t turn);
// out = the sum of all processes' x, in float32 in their order, rounded once. `step` is 0 in the first call. Returns
// TW_DONE, TW_MISMATCH (the processes' calls differ), or the step to call again with: a process did not come in time.
#define TW_DONE -1
#define TW_MISMATCH -2
TW_API int64_t tw_one_shot(const tw_board *board, address x, address out, int64_t num_elems, int64_t kind, int64_t step);
TW_API int64_t tw_two_shot(const tw_board *board, address x, address out, int64_t num_elems, int64_t kind, int64_t step);

// One-shots that another kernel makes one after the other: sum i is of what `x` holds then.
typedef struct {
    const tw_board *board;
    address x, out;
    int64_t num_elems, kind;
    address note, shown;  // before each sum the note's first int64 counts up, and the note is copied to `shown`
    int64_t note_bytes;
    address stamps_ns;  // int64 (sums, 2): when each sum was begun and done, on the clock of time.perf_counter_ns
    int64_t status;     // TW_DONE, or what tw_one_shot returned for the last sum that was begun
    int64_t num_begun, num_done;
} tw_sums;
// Make sum `index`: 1 if it is done, 0 if the caller must return to Python, which goes on with it from `status`.
TW_API int64_t tw_make_sum(tw_sums *sums, int64_t index);
// Wait for sum `index` in a thread beside the one that makes it: 0 if that one left it.
TW_API int64_t tw_await_sum(tw_sums *sums, int64_t index);

// --- codec/: block quantization ------------------------------------------------------------------------------------------

// The fields of kernels/spec/block_format.py.
typedef struct {
    int64_t bits, group_elems, symmetric, hadamard, float8;
} tw_block_format;
// Items are groups. `kind` is that of the numbers; tw_decode_add adds to float32 numbers. `carried`: 0, or bfloat16 numbers of
// whole groups, rotated if the format rotates; encoding adds them to the numbers, and writes there what it lost.
typedef struct {
    address message, numbers, carried;
    int64_t num_elems, kind;
    tw_block_format format;
} tw_code_args;
TW_API void tw_encode(const void *code_args, int64_t start, int64_t stop);
TW_API void tw_decode(const void *code_args, int64_t start, int64_t stop);
TW_API void tw_decode_add(const void *code_args, int64_t start, int64_t stop);
// Encode the float32 sum of `messages`, an array of addresses, added in their order. Items are blocks of 128 numbers.
typedef struct {
    address out, messages, carried;  // as above, of the sum
    int64_t num_messages, num_elems;
    tw_block_format format, out_format;
} tw_recode_args;
TW_API void tw_decode_reduce_encode(const void *recode_args, int64_t start, int64_t stop);

// Encode groups of 64 numbers; `message` has room for 153 bytes a group. Returns the bytes it takes.
TW_API int64_t tw_encode_exponents(address message, address numbers, int64_t num_groups);
// Decode a message of at least 89 bytes a group. Returns 1, or 0 if its length does not fit its codes.
TW_API int64_t tw_decode_exponents(address message, int64_t num_bytes, address numbers, int64_t num_groups);

// --- lora.cpp: low-rank adapters -----------------------------------------------------------------------------------

// The matrices in one entry: A (parts x rank, inputs) and B transposed (rank, outputs) of layer 0; those of layer l follow after
// l times their bytes. B lies in panels of 64 outputs, each (rank, 64); the last one has fewer outputs if need be. Rank 0: the
// entry has none here.
typedef struct {
    address a, b;
    int64_t rank;
} tw_adapter;
// One fused matrix of every layer. Part p has the outputs from part_stops[p - 1] to part_stops[p]. `most_width` is the
// largest parts x rank of the entries.
typedef struct {
    const tw_adapter *entries;
    int64_t num_inputs, num_parts, part_stops[3], kind, most_width;
} tw_adapter_site;
// Rows that follow each other and use the same entry.
typedef struct {
    int64_t first_row, num_rows, entry;
} tw_adapter_run;
// out (T, O) of `out_kind` += (x A^T) B of each run. x (T, D) is of the site's kind; both are contiguous. `shrunk` is memory for
// T x most_width float32 numbers.
typedef struct {
    const tw_adapter_site *site;
    const tw_adapter_run *runs;
    int64_t num_runs, layer;
    address x, shrunk, out;
    int64_t out_kind;
} tw_adapter_args;
// shrunk = x A^T. Items are runs of rows with sixteen outputs each, as many for each run as `most_width` needs.
TW_API void tw_adapter_shrink(const void *adapter_args, int64_t start, int64_t stop);
// out += shrunk B. Items are outputs.
TW_API void tw_adapter_expand(const void *adapter_args, int64_t start, int64_t stop);

// --- layers.cpp: the layers of a few rows ---------------------------------------------------------------------------

// A weight and its bias (or 0) as tw_linear takes them.
typedef struct {
    address data;
    int64_t stride, kind, num_outputs;
} tw_matrix_part;
typedef struct {
    tw_matrix_part parts[3];  // rows that follow each other: all plain, all packed, or all for activations in 8 bits
    int64_t num_parts;
    address bias;
} tw_matrix;
// Norms are 0 where there are none: of each part's input, of the sum before it, and of q and k. `cos` and `sin` are (positions,
// rotated numbers / 2) float32.
typedef struct {
    address attention_norm, mlp_norm, attention_update_norm, mlp_update_norm, q_norm, k_norm, cos, sin, k_cache, v_cache,
        key_bias;
    int64_t window, group;  // `group`: whose slots and block table the layer has
    tw_matrix qkv, attention_out, gate_up, down;
} tw_layer;
// The next item that a thread may draw, how many threads came and left, and how many items of adapters' A products are done. A
// cache line; all zero at the start of a step.
typedef struct {
    int64_t next, came, left, num_shrunk, unused[4];
} tw_phase;
enum { TW_PHASES_PER_LAYER = 9 };

typedef struct {
    const tw_layer *layers;
    tw_phase *phases;
    // The kernels' arguments, without strides of rows and heads, and without what buffers, layers and the step below say.
    tw_norm_args norm;
    tw_rotate_args rotate;
    tw_attend_args attend;
    tw_swiglu_args swiglu;
    int64_t angle_stride;
    // Buffers, contiguous: normed (T, D), qkv (T, (H + 2 K) E), rotated (T, H, E), mixed (T, H, E), gate_up (T, 2 F),
    // gated (T, F); partial (T, D) is the result of a part.
    address normed, qkv, rotated, mixed, gate_up, gated, partial;
    // The step: residual (T, D), to which each part's norm adds the sum before it; int32 positions (T,); slots and, in
    // `attend`, a block table for each group of layers; there also tiles of tw_plan_tiles of one token each.
    int64_t num_rows, num_tiles, group_slots_stride, group_table_stride;
    address residual, positions, slots;
    // The rows with adapters, the adapters for qkv, attention_out, gate_up and down, and memory as in tw_adapter_args.
    int64_t num_adapter_runs;
    const tw_adapter_run *adapter_runs;
    const tw_adapter_site *adapter_sites[4];
    address shrunk;
} tw_layer_program;

// Items are threads that run the parts together: 2l is layer l's attention, 2l + 1 its MLP. `update` is the sum of the part
// before `first`, or 0. With `sums`, thread 0 makes sum (part - first_summed) after each part, up to one that is left.
typedef struct {
    const tw_layer_program *program;
    int64_t first, stop;
    address update;
    tw_sums *sums;
    int64_t first_summed;
} tw_parts_args;
TW_API void tw_run_parts(const void *parts_args, int64_t start, int64_t stop);

#endif
