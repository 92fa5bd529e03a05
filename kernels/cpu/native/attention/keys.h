// One tile's memory, and the keys and values that are read into it from the cache.
#pragma once
#include "../parallel.h"
#include "int8_heads.h"
#include "products.h"

namespace {
constexpr int KEYS = 64;   // per block
constexpr int CHUNK = 48;  // rows that take a step together, their scores in the nearest cache; a multiple of TALL and LANES

// One tile's memory: rows of queries and sums are `padded` floats wide, head_dim rounded up to whole vectors.
struct Buffers {
    int64_t padded;
    float *queries, *sums, *lane_sums, *maxima;  // of all rows
    float *scores;                               // of a chunk of rows
    float *keys_t, *values, *staged;             // of a block of keys
};

Buffers make_buffers(int64_t num_rows, int64_t head_dim) {
    const int64_t padded = (head_dim + LANES - 1) / LANES * LANES;
    num_rows += TALL;
    const int64_t sizes[] = {num_rows * padded, num_rows * padded, num_rows * LANES, (num_rows + CHUNK) / LANES * LANES,
                             CHUNK * KEYS,      padded * KEYS,     KEYS * padded,    LANES * padded};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    float *floats[8], *next = thread_scratch(ATTENTION, total);
    for (int i = 0; i < 8; next += sizes[i++]) floats[i] = next;
    return {padded, floats[0], floats[1], floats[2], floats[3], floats[4], floats[5], floats[6], floats[7]};
}

// `count` numbers as float32, and zeros up to `padded`.
template <class Number>
void widen(const char *source, int64_t count, int64_t, char *target) {
    for (int64_t at = 0; at < count; at += LANES)
        store(target + 4 * at, load_numbers<Number>(source + Number::size * at, count - at));
}

// The same of 16-bit numbers as they are.
void copy_row(const char *source, int64_t count, int64_t padded, char *target) {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    for (int64_t at = 0; at < whole; at += 2 * LANES) store(target + 2 * at, load(source + 2 * at));
    if (whole == count) return;
    memset(target + 2 * whole, 0, 2 * (padded - whole));
    memcpy(target + 2 * whole, source + 2 * whole, 2 * (count - whole));
}

// A position, and the bytes from the start of a cache to its numbers and, in 8 bits, to their scale.
struct Place {
    int64_t position, numbers, scale;
};

// Walks one sequence's keys and values in the cache, position by position.
struct CacheWalk {
    const int32_t *blocks;
    int64_t block_stride, head_offset, token_bytes, tokens_per_block;
    int64_t index, in_block, last;  // of the next position; the sequence's last index

    CacheWalk(const tw_attend_args &args, int64_t seq, int64_t kv_head, int64_t first_key, int64_t num_keys) {
        blocks = (const int32_t *)(args.block_table + seq * args.table_stride);
        block_stride = args.cache_block_stride, tokens_per_block = args.tokens_per_block,
        last = (num_keys - 1) / tokens_per_block;
        token_bytes = args.cache_kind == INT8_HEADS ? args.head_dim : args.head_dim * size_of(args.cache_kind);
        head_offset = kv_head * tokens_per_block * cache_head_bytes(args.cache_kind, args.head_dim);
        index = first_key / tokens_per_block, in_block = first_key % tokens_per_block;
    }
    // Also asks for the same place in the next block, because the CPU's own prefetchers begin anew with each block.
    Place next(const tw_attend_args &args) {
        const int64_t head = blocks[index] * block_stride + head_offset;
        const Place place = {index * tokens_per_block + in_block, head + in_block * token_bytes,
                             head + tokens_per_block * token_bytes + in_block * SCALE_BYTES};
        const int64_t ahead = (blocks[index + (index < last)] - blocks[index]) * block_stride + place.numbers;
        for (int64_t at = ahead; at < ahead + token_bytes; at += LINE_BYTES)
            prefetch((const char *)args.k_cache + at), prefetch((const char *)args.v_cache + at);
        if (++in_block == tokens_per_block) in_block = 0, index++;
        return place;
    }
};

// A head of codes as numbers, and zeros up to `padded`.
template <class Out>
INLINE void decode_head(const char *cache, const Place &place, int64_t size, int64_t padded, char *target) {
    const F32 scale = load_scale(cache + place.scale);
    for (int64_t at = 0; at < padded; at += LANES)
        Out::store_rounded(target + Out::size * at, load_numbers<Codes>(cache + place.numbers + at, size - at) * scale);
}

// The same of a key, and its bias turned to its position.
template <class Out>
INLINE void decode_biased(const tw_attend_args &args, const Place &place, int64_t kv_head, int64_t padded, char *target) {
    const tw_key_bias &added = args.key_bias;
    const int64_t half = added.half, size = args.head_dim;
    const char *codes = (const char *)args.k_cache + place.numbers, *bias = (const char *)added.bias + 4 * kv_head * size;
    const char *cosines = (const char *)(added.cos + 4 * place.position * half);
    const char *sines = (const char *)(added.sin + 4 * place.position * half);
    const F32 scale = load_scale((const char *)args.k_cache + place.scale);
    if (size < padded) memset(target + Out::size * size, 0, Out::size * (padded - size));
    for (int64_t at = 0; at < half; at += LANES) {
        const int64_t left = half - at, second = half + at;
        const F32 cos = load_numbers<Float32>(cosines + 4 * at, left), sin = load_numbers<Float32>(sines + 4 * at, left);
        const F32 a = load_numbers<Float32>(bias + 4 * at, left), b = load_numbers<Float32>(bias + 4 * second, left);
        const F32 x = load_numbers<Codes>(codes + at, left) * scale, y = load_numbers<Codes>(codes + second, left) * scale;
        store_rounded<Out>(target + Out::size * at, x + (a * cos - b * sin), left);
        store_rounded<Out>(target + Out::size * second, y + (b * cos + a * sin), left);
    }
    for (int64_t at = 2 * half, left = size - at; at < size; at += LANES, left -= LANES)
        store_rounded<Out>(target + Out::size * at,
                           load_numbers<Codes>(codes + at, left) * scale + load_numbers<Float32>(bias + 4 * at, left), left);
}

// A position's key and value as rows of Out.
template <class Out>
INLINE void decode_codes(const tw_attend_args &args, const Place &place, int64_t kv_head, int64_t padded, char *key,
                         char *value) {
    if (args.key_bias.bias)
        decode_biased<Out>(args, place, kv_head, padded, key);
    else
        decode_head<Out>((const char *)args.k_cache, place, args.head_dim, padded, key);
    decode_head<Out>((const char *)args.v_cache, place, args.head_dim, padded, value);
}

// The next sixteen keys, of which `count` exist, into columns of `keys_t`, and their values into rows of `values`. In pairs these
// are two neighbours of a key, and for values two keys that follow each other. Staged first, key and value in one row:
// transposing in place takes longer, because memory is read out of order.
template <class Number, bool IN_PAIRS>
void read_keys(const tw_attend_args &args, CacheWalk &walk, int64_t kv_head, int64_t count, const Buffers &buffers,
               float *keys_t, float *values) {
    const int64_t padded = buffers.padded, value_at = 2 * padded;
    for (int key = 0; key < LANES; key++) {
        char *row = (char *)(buffers.staged + padded * key);
        char *value_row = IN_PAIRS ? row + value_at : (char *)(values + padded * key);
        if (key >= count) {
            memset(row, 0, 4 * padded);
            if (!IN_PAIRS) memset(value_row, 0, 4 * padded);
            continue;
        }
        const Place place = walk.next(args);
        if constexpr (Number::size == 1 && IN_PAIRS) {
            decode_codes<BFloat16>(args, place, kv_head, padded, row, value_row);
        } else if constexpr (Number::size == 1) {
            decode_codes<Float32>(args, place, kv_head, padded, row, value_row);
        } else {
            constexpr auto read = IN_PAIRS ? copy_row : widen<Number>;
            read((const char *)args.k_cache + place.numbers, args.head_dim, padded, row);
            read((const char *)args.v_cache + place.numbers, args.head_dim, padded, value_row);
        }
    }
    for (int64_t at = 0; at < (IN_PAIRS ? padded / 2 : padded); at += LANES)
        transpose(buffers.staged + at, padded, keys_t + KEYS * at, KEYS);
    if (!IN_PAIRS) return;
    for (int key = 0; key < LANES; key += 2) {
        const char *first = (const char *)(buffers.staged + padded * key) + value_at, *second = first + 4 * padded;
        for (int64_t at = 0; at < padded; at += LANES) {
            I32 pairs = load_low_halves(first + 2 * at) | shift_left(load_low_halves(second + 2 * at), 16);
            store(values + padded * (key / 2) + at, floats_of(pairs));
        }
    }
}
}  // namespace
