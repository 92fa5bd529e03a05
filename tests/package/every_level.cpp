// Runs kernels on numbers from a seed and prints a hash of each result: every level must print the same lines.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static uint64_t state = 1;
static uint32_t draw() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}
static float draw_float() { return (float)(int32_t)(draw() << 1) / 2147483648.0f; }

static void *filled(size_t bytes, bool floats) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    for (size_t i = 0; i < bytes; i++)
        if (!floats)
            ((uint8_t *)memory)[i] = (uint8_t)draw();
        else if (i % 4 == 0)
            ((float *)memory)[i / 4] = draw_float();
    return memory;
}
static void report(const char *name, long number, const void *data, size_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    printf("%s %ld %016llx\n", name, number, (unsigned long long)hash);
}

// Bytes of a block of each packed format from kind 3 on, and where its float16 numbers are; the exponent of MXFP4 is a byte.
static const struct {
    int bytes, elems, floats[2];
} FORMATS[] = {{34, 32, {0, -1}},  {18, 32, {0, -1}},     {20, 32, {0, 2}},    {22, 32, {0, -1}},     {24, 32, {0, 2}},
               {18, 32, {0, -1}},  {17, 32, {-1, -1}},    {84, 256, {80, 82}}, {110, 256, {108, -1}}, {144, 256, {0, 2}},
               {176, 256, {0, 2}}, {210, 256, {208, -1}}, {136, 256, {0, -1}}};
static const int64_t FEW_AND_MANY[] = {1, 5, 70}, NUMBER_KINDS[] = {0, 1, 2}, CACHE_KINDS[] = {0, -1};
enum { INPUTS = 1536, OUTPUTS = 37, MXFP4 = 9, INT8 = 32, INTERLEAVED = 64 };

static uint8_t *packed_rows(int64_t kind, size_t *row_bytes) {
    const auto &format = FORMATS[kind - 3];
    *row_bytes = (size_t)(INPUTS / format.elems * format.bytes);
    uint8_t *rows = (uint8_t *)filled(OUTPUTS * *row_bytes, false);
    for (size_t at = 0; at < OUTPUTS * *row_bytes; at += (size_t)format.bytes) {
        for (int place : format.floats)
            if (place >= 0) rows[at + (size_t)place + 1] &= 0xBB;  // below 1, and finite
        if (kind == MXFP4) rows[at] = (uint8_t)(120 + rows[at] % 10);
    }
    return rows;
}

static tw_linear_args product_of(const float *x, const uint8_t *weights, int64_t row_bytes, int64_t kind, int64_t tokens,
                                 float *out) {
    return {(address)out, (address)x, (address)weights, 0, 4 * INPUTS, row_bytes, kind, tokens, OUTPUTS, INPUTS, 0, 0, 0, nullptr};
}

// Multiply with weights of `kind`, after the rows are prepared if they must be.
static void multiply(const char *name, tw_linear_args args, int64_t kind) {
    tw_rows_args rows = {0, args.x, args.x_stride, args.num_tokens, INPUTS, OUTPUTS, 0, kind};
    const int64_t prepared_bytes = tw_prepared_bytes(&rows);
    void *prepared = calloc(1, (size_t)prepared_bytes + 64);
    rows.out = ((address)prepared + 63) / 64 * 64;
    if (prepared_bytes) {
        tw_prepare_rows(&rows, 0, (args.num_tokens + 15) / 16);
        args.x = rows.out, args.x_stride = tw_prepared_stride(&rows);
    }
    args.weight_kind = kind;
    tw_linear(&args, 0, OUTPUTS);
    report(name, kind * 100 + args.num_tokens, (void *)args.out, (size_t)(4 * args.num_tokens * OUTPUTS));
    free(prepared);
}

static void run_linear() {
    for (int64_t kind = 3; kind < 16; kind++) {
        size_t row_bytes;
        uint8_t *weights = packed_rows(kind, &row_bytes);
        for (int64_t tokens : FEW_AND_MANY) {
            float *x = (float *)filled((size_t)(4 * tokens * INPUTS), true),
                  *out = (float *)filled((size_t)(4 * tokens * OUTPUTS), true);
            tw_linear_args args = product_of(x, weights, (int64_t)row_bytes, kind, tokens, out);
            multiply("linear", args, kind);
            multiply("linear_int8", args, kind | INT8);
            uint8_t *interleaved = (uint8_t *)aligned_alloc(64, (OUTPUTS * row_bytes + 63) / 64 * 64);
            memcpy(interleaved, weights, OUTPUTS * row_bytes);
            tw_interleave_args whole = {(address)interleaved, kind, INPUTS / 32};
            tw_interleave(&whole, 0, OUTPUTS / 16);
            args.weight = (address)interleaved;
            multiply("interleaved", args, kind | INT8 | INTERLEAVED);
            free(x), free(out), free(interleaved);
        }
        float *plain = (float *)filled(4 * OUTPUTS * INPUTS, true);
        tw_unpack_args unpack = {(address)plain, (address)weights, 0, 0, kind, (int64_t)row_bytes, OUTPUTS, INPUTS / 32};
        tw_unpack(&unpack, 0, OUTPUTS);
        report("unpack", kind, plain, 4 * OUTPUTS * INPUTS);
        free(weights), free(plain);
    }
    for (int64_t kind : NUMBER_KINDS)  // plain weights; 16-bit numbers below 2
        for (int64_t tokens : FEW_AND_MANY) {
            uint8_t *weights = (uint8_t *)filled(4 * OUTPUTS * INPUTS, kind == 0);
            for (size_t i = 1; kind && i < 4 * OUTPUTS * INPUTS; i += 2) weights[i] &= 0xBB;
            float *x = (float *)filled((size_t)(4 * tokens * INPUTS), true),
                  *out = (float *)filled((size_t)(4 * tokens * OUTPUTS), true);
            const tw_linear_args args = product_of(x, weights, (kind ? 2 : 4) * INPUTS, kind, tokens, out);
            multiply("linear", args, kind);
            free(weights), free(x), free(out);
        }
}

enum { TOKENS = 5, CONTEXT = 150, HEADS = 6, KV_HEADS = 2, ALL_HEADS = 10, DIM = 80, BLOCK = 16, BLOCKS = 10 };

static void run_rotation(const float *qkv, const float *cos, const float *sin, uint8_t **caches, int64_t kind,
                         int64_t block_bytes) {
    float *rows = (float *)filled(4 * TOKENS * ALL_HEADS * DIM, true),
          *queries = (float *)filled(4 * TOKENS * HEADS * DIM, true);
    float *weight = (float *)filled(4 * DIM, true);
    memcpy(rows, qkv, 4 * TOKENS * ALL_HEADS * DIM);
    int32_t slots[TOKENS] = {3, 4, 31, 0, 150};
    tw_rotate_args args = {.queries = (address)queries,
                           .qkv = (address)rows,
                           .cos = (address)cos,
                           .sin = (address)sin,
                           .k_cache = (address)caches[0],
                           .v_cache = (address)caches[1],
                           .slots = (address)slots,
                           .token_stride = 4 * ALL_HEADS * DIM,
                           .head_stride = 4 * DIM,
                           .cos_stride = 2 * DIM,
                           .sin_stride = 2 * DIM,
                           .cache_block_stride = block_bytes,
                           .num_heads = HEADS,
                           .num_kv_heads = KV_HEADS,
                           .half = DIM / 2,
                           .head_dim = DIM,
                           .tokens_per_block = BLOCK,
                           .kind = 0,
                           .cache_kind = kind,
                           .norms = {(address)weight, (address)weight, 0, 0, 1e-6, 1.0}};
    tw_rotate_and_cache(&args, 0, TOKENS);
    report("rotated", kind, queries, 4 * TOKENS * HEADS * DIM);
    report("keys", kind, caches[0], (size_t)(BLOCKS * block_bytes));
    report("values", kind, caches[1], (size_t)(BLOCKS * block_bytes));
    free(rows), free(queries), free(weight);
}

static void run_attention() {
    float *q = (float *)filled(4 * TOKENS * ALL_HEADS * DIM, true), *out = (float *)filled(4 * TOKENS * HEADS * DIM, true);
    int32_t query_start[] = {0, TOKENS}, context_lens[] = {CONTEXT}, table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = BLOCKS - 1 - i;
    int64_t tiles[9];
    tw_plan_args plan = {(address)query_start,
                         (address)context_lens,
                         (address)table,
                         (address)tiles,
                         1,
                         TOKENS,
                         4,
                         4 * BLOCKS,
                         BLOCKS,
                         BLOCKS,
                         BLOCK,
                         0,
                         0};
    if (tw_plan_tiles(&plan) != -1) abort();
    float *bias = (float *)filled(4 * KV_HEADS * DIM, true), *cos = (float *)filled(2 * CONTEXT * DIM, true),
          *sin = (float *)filled(2 * CONTEXT * DIM, true);
    for (int64_t kind : CACHE_KINDS) {
        const int64_t head_bytes = kind == 0 ? 4 * DIM : DIM + 2, block_bytes = KV_HEADS * BLOCK * head_bytes;
        uint8_t *caches[2];
        for (uint8_t *&cache : caches) {
            cache = (uint8_t *)filled((size_t)(BLOCKS * block_bytes), kind == 0);
            for (int64_t head = 0; kind && head < BLOCKS * KV_HEADS; head++)  // scales of bfloat16 near 2^-7
                for (int i = 0; i < BLOCK; i++) memcpy(cache + (head * head_bytes + DIM) * BLOCK + 2 * i, "\x10\x3c", 2);
        }
        tw_attend_args args = {.out = (address)out,
                               .q = (address)q,
                               .k_cache = (address)caches[0],
                               .v_cache = (address)caches[1],
                               .query_start = (address)query_start,
                               .context_lens = (address)context_lens,
                               .block_table = (address)table,
                               .tiles = (address)tiles,
                               .q_token_stride = 4 * HEADS * DIM,
                               .q_head_stride = 4 * DIM,
                               .kind = 0,
                               .cache_block_stride = block_bytes,
                               .cache_kind = kind,
                               .table_stride = 4 * BLOCKS,
                               .tokens_per_block = BLOCK,
                               .num_heads = HEADS,
                               .num_kv_heads = KV_HEADS,
                               .heads_per_kv_head = HEADS / KV_HEADS,
                               .skipped_heads = 0,
                               .head_dim = DIM,
                               .scale_log2 = 0.2,
                               .cap_log2 = 0,
                               .window = 0,
                               .key_bias = {0, 0, 0, 0}};
        tw_attend(&args, 0, plan.num_tiles * KV_HEADS);
        report("attend", kind, out, 4 * TOKENS * HEADS * DIM);
        args.window = 40, args.cap_log2 = 8;
        args.key_bias = {(address)bias, (address)cos, (address)sin, DIM / 2};
        tw_attend(&args, 0, plan.num_tiles * KV_HEADS);
        report("attend_window_cap_bias", kind, out, 4 * TOKENS * HEADS * DIM);
        run_rotation(q, cos, sin, caches, kind, block_bytes);
        free(caches[0]), free(caches[1]);
    }
    free(q), free(out), free(bias), free(cos), free(sin);
}

static void run_codec() {
    enum { NUMBERS = 1000, WHOLE = 1024, MESSAGE = 4 * WHOLE };
    // Bits, numbers of a group, symmetric, rotated, float8.
    static const tw_block_format CODECS[] = {{8, 128, 0, 0, 0}, {6, 64, 0, 1, 0}, {5, 32, 1, 0, 0}, {4, 128, 1, 1, 0},
                                             {3, 32, 0, 0, 0},  {2, 64, 0, 1, 0}, {8, 128, 0, 0, 1}};
    float *numbers = (float *)filled(4 * WHOLE, true), *out = (float *)filled(4 * WHOLE, true);
    for (const tw_block_format &format : CODECS) {
        const long name = (long)(format.bits * 10000 + format.group_elems * 10 + format.hadamard + 2 * format.float8);
        const int64_t groups = (NUMBERS + format.group_elems - 1) / format.group_elems;
        uint8_t *message = (uint8_t *)calloc(1, MESSAGE), *carried = (uint8_t *)calloc(1, 2 * WHOLE),
                *sum = (uint8_t *)calloc(1, MESSAGE);
        tw_code_args args = {(address)message, (address)numbers, (address)carried, NUMBERS, 0, format};
        tw_encode(&args, 0, groups);
        report("encoded", name, message, MESSAGE);
        report("carried", name, carried, 2 * WHOLE);
        args.numbers = (address)out, args.carried = 0;
        tw_decode(&args, 0, groups);
        report("decoded", name, out, 4 * NUMBERS);
        tw_decode_add(&args, 0, groups);
        report("added", name, out, 4 * NUMBERS);
        const address messages[] = {(address)message, (address)message, (address)message};
        tw_recode_args recode = {(address)sum, (address)messages, 0, 3, NUMBERS, format, format};
        tw_decode_reduce_encode(&recode, 0, WHOLE / 128);
        report("reduced", name, sum, MESSAGE);
        free(message), free(carried), free(sum);
    }
    free(numbers), free(out);
}

static void run_rows() {
    enum { ROWS = 3, SIZE = 200 };
    float *x = (float *)filled(4 * ROWS * SIZE, true), *weight = (float *)filled(4 * SIZE, true);
    float *out = (float *)filled(4 * ROWS * SIZE, true);
    tw_norm_args norm = {.out = (address)out,
                         .total = 0,
                         .x = (address)x,
                         .residual = 0,
                         .weight = (address)weight,
                         .x_stride = 4 * SIZE,
                         .residual_stride = 0,
                         .size = SIZE,
                         .kind = 0,
                         .sum_kind = 0,
                         .eps = 1e-5,
                         .offset = 0,
                         .scale = 1,
                         .x_weight = 0};
    tw_norm(&norm, 0, ROWS);
    report("norm", 0, out, 4 * ROWS * SIZE);
    for (int64_t gelu = 0; gelu < 2; gelu++) {
        tw_swiglu_args gate = {(address)out, (address)x, 4 * SIZE, SIZE / 2, 0, gelu};
        tw_swiglu(&gate, 0, ROWS);
        report("swiglu", gelu, out, 4 * ROWS * SIZE / 2);
    }
    int64_t keys[ROWS];
    tw_best_keys((address)keys, (address)x, 4 * SIZE, ROWS, SIZE, 7);
    report("best", 0, keys, sizeof keys);
    free(x), free(weight), free(out);
}

int main() {
    run_linear();
    run_attention();
    run_codec();
    run_rows();
    return 0;
}
