// Paged causal attention that reads keys and values where they lie in the cache.
//
// A tile is up to 96 query rows: some tokens of one sequence, times the query heads of one KV head. So a block of keys is
// read once for all of them. A tile walks its keys in blocks of 64 from position 0 with an online softmax:
//
//     1. widen 64 keys, transpose them, scores = q @ k^T             (q was multiplied by scale * log2(e))
//     2. new maximum; multiply the sums by 2^(old - new); p = 2^(score - new)
//     3. widen 64 values, sums += p @ v
//
// With AVX512-BF16 bfloat16 is not widened: two numbers are multiplied and added at once, neighbours of a row for the
// scores, and two keys that follow each other for the values. Scores are scaled after their product then, and p is
// rounded to bfloat16 for step 3, as attention on GPUs does.
//
// A row's bits depend on its own sequence alone: blocks of keys begin at position 0 and are whole (absent keys count as
// zeros), every sum runs in order of position, and the shape of a tile changes no arithmetic. Chunks of a prompt, other
// sequences and the number of threads change nothing.
#include "kernels.h"
#include "numbers.h"
#include "parallel.h"

constexpr int KEYS = 64;  // per block
constexpr int CHUNK =
    48;  // rows that take a step together: their scores stay in the nearest cache; a multiple of TALL and LANES
constexpr float MINUS_INFINITY = -__builtin_inff();

// --- products -------------------------------------------------------------------------------------------------------

// c = a @ b or c = c * factor of the row + a @ b. Strides are in floats. In pairs each float of a and b is two bfloat16 numbers.
struct Product {
    float *c;
    const float *a, *b;
    int64_t c_stride, a_stride, b_stride, num_rows, depth;
    const float *factors;
};

template <bool IN_PAIRS>
INLINE F32 add_product(F32 a, F32 b, F32 sum) {
#if defined(__AVX512BF16__)
    if constexpr (IN_PAIRS) {
        sum.reg[0] = (FloatReg)_mm512_dpbf16_ps((__m512)sum.reg[0], (__m512bh)a.reg[0], (__m512bh)b.reg[0]);
        return sum;
    }
#endif
    return fma(a, b, sum);
}

// A tile of c, whose sums stay in registers. Each is one chain of multiply-adds in order of depth, whatever the shape.
template <int ROWS, int VECTORS, bool ACCUMULATE, bool IN_PAIRS>
static void multiply_tile(const Product &product, int64_t first_row, int64_t first_column) {
    float *c = product.c + first_row * product.c_stride + first_column;
    const float *a = product.a + first_row * product.a_stride, *b = product.b + first_column;
    F32 sums[ROWS][VECTORS];
    UNROLL for (int row = 0; row < ROWS; row++) UNROLL
        for (int i = 0; i < VECTORS; i++)
            sums[row][i] = ACCUMULATE ? load(c + row * product.c_stride + LANES * i) * splat(product.factors[first_row + row])
                                      : splat(0.0f);
    for (int64_t k = 0; k < product.depth; k++, a++, b += product.b_stride) {
        F32 factors[VECTORS];
        UNROLL for (int i = 0; i < VECTORS; i++)
            factors[i] = load(b + LANES * i);
        UNROLL for (int row = 0; row < ROWS; row++) {
            F32 factor = splat(a[row * product.a_stride]);
            UNROLL for (int i = 0; i < VECTORS; i++)
                sums[row][i] = add_product<IN_PAIRS>(factor, factors[i], sums[row][i]);
        }
    }
    UNROLL for (int row = 0; row < ROWS; row++) UNROLL
        for (int i = 0; i < VECTORS; i++) store(c + row * product.c_stride + LANES * i, sums[row][i]);
}

template <int ROWS, int VECTORS, int COLUMNS, bool ACCUMULATE, bool IN_PAIRS>
static void multiply_tiles(const Product &product) {
    constexpr int FITTING = VECTORS * LANES < COLUMNS ? VECTORS : COLUMNS / LANES;
    for (int64_t column = 0; column < COLUMNS; column += FITTING * LANES)
        for (int64_t row = 0; row < product.num_rows; row += ROWS)
            multiply_tile<ROWS, FITTING, ACCUMULATE, IN_PAIRS>(product, row, column);
}

constexpr int TALL = WIDE ? 4 : 6;  // rows of the tallest tile; a and c have rows up to a multiple of it

// The product of COLUMNS columns, in tiles whose sums fit the registers: 32 of 16 floats, or 16 of 8.
template <int COLUMNS, bool ACCUMULATE, bool IN_PAIRS>
static void multiply(const Product &product) {
    if (product.num_rows == 1) return multiply_tiles<1, 4, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows == 2) return multiply_tiles<2, WIDE ? 4 : 2, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows <= 4) return multiply_tiles<4, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    multiply_tiles<TALL, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
}

// --- keys and values ------------------------------------------------------------------------------------------------

// One tile's memory: rows of queries and sums are `padded` floats wide, head_dim rounded up to whole vectors.
struct Buffers {
    int64_t padded;
    float *queries, *sums, *lane_sums, *maxima;  // of all rows
    float *scores;                               // of a chunk of rows
    float *keys_t, *values, *staged;             // of a block of keys
};

static Buffers make_buffers(int64_t num_rows, int64_t head_dim) {
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

// Four floats of every fourth row: of four rows with registers of sixteen lanes, of two with eight, of one with four.
INLINE FloatReg load_fours(const float *row, int64_t stride) {
#if defined(__AVX512F__)
    __m512 fours = _mm512_castps128_ps512(_mm_loadu_ps(row));
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(row + 4 * stride), 1);
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(row + 8 * stride), 2);
    return (FloatReg)_mm512_insertf32x4(fours, _mm_loadu_ps(row + 12 * stride), 3);
#elif defined(__AVX2__)
    __m256 fours = _mm256_castps128_ps256(_mm_loadu_ps(row));
    return (FloatReg)_mm256_insertf128_ps(fours, _mm_loadu_ps(row + 4 * stride), 1);
#else
    (void)stride;
    return (FloatReg)vld1q_f32(row);
#endif
}

// Within each four lanes: lanes I to L of a (0 to 3) and b (4 to 7).
template <int I, int J, int K, int L>
INLINE FloatReg pick(FloatReg a, FloatReg b) {
#define LANE(first, i) (first) + ((i) < 4 ? (i) : (i) - 4 + REG_LANES)
#define FOUR(first) LANE(first, I), LANE(first, J), LANE(first, K), LANE(first, L)
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, FOUR(0), FOUR(4), FOUR(8), FOUR(12));
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, FOUR(0), FOUR(4));
#else
    return __builtin_shufflevector(a, b, FOUR(0));
#endif
#undef FOUR
#undef LANE
}

// Sixteen floats of each of sixteen rows become sixteen rows of sixteen.
INLINE void transpose(const float *rows, int64_t row_stride, float *target, int64_t target_stride) {
    UNROLL for (int column = 0; column < LANES; column += 4) {
        UNROLL for (int i = 0; i < REGS; i++) {
            FloatReg fours[4];
            const float *first = rows + REG_LANES * i * row_stride + column;
            UNROLL for (int row = 0; row < 4; row++)
                fours[row] = load_fours(first + row * row_stride, row_stride);
            FloatReg low_01 = pick<0, 4, 1, 5>(fours[0], fours[1]), low_23 = pick<0, 4, 1, 5>(fours[2], fours[3]);
            FloatReg high_01 = pick<2, 6, 3, 7>(fours[0], fours[1]), high_23 = pick<2, 6, 3, 7>(fours[2], fours[3]);
            FloatReg columns[] = {pick<0, 1, 4, 5>(low_01, low_23), pick<2, 3, 6, 7>(low_01, low_23),
                                  pick<0, 1, 4, 5>(high_01, high_23), pick<2, 3, 6, 7>(high_01, high_23)};
            UNROLL for (int k = 0; k < 4; k++)
                memcpy(target + (column + k) * target_stride + REG_LANES * i, &columns[k], sizeof columns[k]);
        }
    }
}

// `count` numbers as float32; `target` has room for whole vectors.
template <class Number>
static void widen(const char *source, int64_t count, float *target) {
    for (int64_t at = 0; at < count; at += LANES)
        store(target + at, load_numbers<Number>(source + Number::size * at, count - at));
}

// Walks one sequence's keys and values in the cache, position by position.
struct CacheWalk {
    const int32_t *blocks;
    int64_t block_stride, head_offset, token_bytes, tokens_per_block;
    int64_t index, in_block;  // of the next position

    CacheWalk(const tw_attend_args &args, int64_t seq, int64_t kv_head) {
        blocks = (const int32_t *)(args.block_table + seq * args.table_stride);
        block_stride = args.cache_block_stride, tokens_per_block = args.tokens_per_block;
        token_bytes = args.head_dim * size_of(args.cache_kind);
        head_offset = kv_head * tokens_per_block * token_bytes;
        index = in_block = 0;
    }
    // Bytes from the start of a cache to the next position's numbers.
    int64_t next() {
        const int64_t offset = blocks[index] * block_stride + head_offset + in_block * token_bytes;
        if (++in_block == tokens_per_block) in_block = 0, index++;
        return offset;
    }
};

// `count` 16-bit numbers, and zeros up to `padded`.
static void copy_row(const char *source, int64_t count, int64_t padded, char *target) {
    const int64_t whole = count / (2 * LANES) * (2 * LANES);
    for (int64_t at = 0; at < whole; at += 2 * LANES) store(target + 2 * at, load(source + 2 * at));
    if (whole == count) return;
    memset(target + 2 * whole, 0, 2 * (padded - whole));
    memcpy(target + 2 * whole, source + 2 * whole, 2 * (count - whole));
}

// The next sixteen keys, of which `count` exist, into columns of `keys_t`, and their values into rows of `values`.
template <class Number>
static void read_keys(const tw_attend_args &args, CacheWalk &walk, int64_t count, const Buffers &buffers, float *keys_t,
                      float *values) {
    const int64_t padded = buffers.padded;
    for (int key = 0; key < LANES; key++) {
        float *row = buffers.staged + padded * key, *value_row = values + padded * key;
        if (key < count) {
            const int64_t offset = walk.next();
            widen<Number>((const char *)args.k_cache + offset, args.head_dim, row);
            widen<Number>((const char *)args.v_cache + offset, args.head_dim, value_row);
        } else {
            memset(row, 0, 4 * padded);
            memset(value_row, 0, 4 * padded);
        }
    }
    for (int64_t at = 0; at < padded; at += LANES) transpose(buffers.staged + at, padded, keys_t + KEYS * at, KEYS);
}

// The same of bfloat16 numbers in pairs: two neighbours of a key, and for values two keys that follow each other. Staged
// first, key and value in one row: transposing in place takes longer, because memory is read out of order.
[[maybe_unused]] static void read_keys_in_pairs(const tw_attend_args &args, CacheWalk &walk, int64_t count,
                                                const Buffers &buffers, float *keys_t, float *values) {
    const int64_t padded = buffers.padded, value_at = 2 * padded;
    for (int key = 0; key < LANES; key++) {
        char *row = (char *)(buffers.staged + padded * key);
        if (key < count) {
            const int64_t offset = walk.next();
            copy_row((const char *)args.k_cache + offset, args.head_dim, padded, row);
            copy_row((const char *)args.v_cache + offset, args.head_dim, padded, row + value_at);
        } else {
            memset(row, 0, 4 * padded);
        }
    }
    for (int64_t at = 0; at < padded / 2; at += LANES) transpose(buffers.staged + at, padded, keys_t + KEYS * at, KEYS);
    for (int key = 0; key < LANES; key += 2) {
        const char *first = (const char *)(buffers.staged + padded * key) + value_at, *second = first + 4 * padded;
        for (int64_t at = 0; at < padded; at += LANES) {
            I32 pairs = load_low_halves(first + 2 * at) | shift_left(load_low_halves(second + 2 * at), 16);
            store(values + padded * (key / 2) + at, floats_of(pairs));
        }
    }
}

// --- softmax --------------------------------------------------------------------------------------------------------

// Rows of a tile that take a step together.
struct Chunk {
    int64_t first_row, num_rows;
    float shrink[CHUNK];  // 2^(old maximum - new maximum) of each row
};

// Masks a row's scores from `visible` on, and returns the largest.
INLINE float mask_scores(float *scores, int64_t visible) {
    F32 high[KEYS / LANES];
    UNROLL for (int i = 0; i < KEYS / LANES; i++) {
        high[i] = load(scores + LANES * i);
        if (visible < KEYS) {
            high[i] = keep_first(high[i], visible - LANES * i, MINUS_INFINITY);
            store(scores + LANES * i, high[i]);
        }
    }
    return max_lanes(maximum(maximum(high[0], high[1]), maximum(high[2], high[3])));
}

// The step's new maxima; a NaN stays.
static void raise_maxima(float *maxima, const float *highest, float scale, Chunk &chunk) {
    int64_t num_below = 0;
    while (num_below < chunk.num_rows && highest[num_below] * scale <= maxima[num_below]) num_below++;
    const bool none_rises = num_below == chunk.num_rows;  // usual when rows are few and many keys came before
    for (int64_t row = 0; row < chunk.num_rows; row += LANES) {
        store(chunk.shrink + row, splat(1.0f));
        if (none_rises) continue;
        const F32 old = load(maxima + row), high = load(highest + row) * splat(scale);
        const I32 stays = high <= old;
        F32 power[] = {old - high};
        exp2(power);
        store(chunk.shrink + row, select(stays, splat(1.0f), power[0]));
        store(maxima + row, select(stays, old, high));
    }
}

// Scores of a row become p, in pairs as bfloat16 in the first half of the row.
template <bool IN_PAIRS>
INLINE void soften(float *scores, float *lane_sums, float maximum, float shrink, float scale) {
    constexpr int VECTORS = KEYS / LANES;
    F32 p[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; i++) {
        p[i] = load(scores + LANES * i);
        if (IN_PAIRS) p[i] = p[i] * splat(scale);
        p[i] = p[i] - splat(maximum);
    }
    exp2(p);
    UNROLL for (int i = 0; i < VECTORS; i++) {
        if (IN_PAIRS)
            BFloat16::store_rounded((char *)scores + 2 * LANES * i, p[i]);
        else
            store(scores + LANES * i, p[i]);
    }
    F32 total = (p[0] + p[1]) + (p[2] + p[3]);
    store(lane_sums, fma(load(lane_sums), splat(shrink), total));
}

// --- tiles ----------------------------------------------------------------------------------------------------------

// The rows of one tile and KV head: row i is token `first_token + i / num_heads`, head `first_head + i % num_heads`.
struct Rows {
    int64_t first_token, first_head, num_heads, num_rows;
};

template <class Number, bool IN_PAIRS>
static void read_queries(const tw_attend_args &args, const Rows &rows, const Buffers &buffers) {
    const int64_t padded = buffers.padded, all_rows = rows.num_rows + TALL;
    const F32 scale = splat((float)args.scale_log2);
    memset(buffers.queries + padded * rows.num_rows, 0, 4 * padded * TALL);
    for (int64_t row = 0; row < rows.num_rows; row++) {
        const int64_t token = rows.first_token + row / rows.num_heads, head = rows.first_head + row % rows.num_heads;
        const char *source = (const char *)args.q + token * args.q_token_stride + head * args.q_head_stride;
        float *target = buffers.queries + padded * row;
        if (IN_PAIRS) {
            copy_row(source, args.head_dim, padded, (char *)target);
        } else {
            for (int64_t at = 0; at < padded; at += LANES)
                store(target + at, load_numbers<Number>(source + Number::size * at, args.head_dim - at) * scale);
        }
    }
    memset(buffers.lane_sums, 0, 4 * LANES * all_rows);
    for (int64_t row = 0; row < all_rows; row++) buffers.maxima[row] = MINUS_INFINITY;
}

template <class Number>
static void write_results(const tw_attend_args &args, const Rows &rows, const Buffers &buffers) {
    const int64_t head_dim = args.head_dim;
    for (int64_t row = 0; row < rows.num_rows; row++) {
        const int64_t token = rows.first_token + row / rows.num_heads, head = rows.first_head + row % rows.num_heads;
        char *target = (char *)args.out + (token * args.num_heads + head) * head_dim * Number::size;
        const F32 total = splat(sum_lanes(load(buffers.lane_sums + LANES * row)));
        for (int64_t at = 0; at < head_dim; at += LANES) {
            // A negative zero becomes 0, as it does where more keys are masked.
            F32 mean = (load(buffers.sums + buffers.padded * row + at) + splat(0.0f)) / total;
            store_numbers<Number>(target + Number::size * at, mean, head_dim - at);
        }
    }
}

// sums (rows, padded) = sums * shrink + weights (rows, depth) @ values; without ACCUMULATE they begin.
template <bool ACCUMULATE, bool IN_PAIRS>
static void add_values(const Buffers &buffers, const Chunk &chunk, int64_t depth) {
    const int64_t padded = buffers.padded;
    float *sums = buffers.sums + padded * chunk.first_row;
    Product product = {sums, buffers.scores, buffers.values, padded, KEYS, padded, chunk.num_rows, depth, chunk.shrink};
    int64_t column = 0;
    for (; column + KEYS <= padded; column += KEYS, product.c += KEYS, product.b += KEYS)
        multiply<KEYS, ACCUMULATE, IN_PAIRS>(product);
    for (; column < padded; column += LANES, product.c += LANES, product.b += LANES)
        multiply<LANES, ACCUMULATE, IN_PAIRS>(product);
}

// Keys that a tile visits together: `width` were read, all or half of a block. The tile's first token sees `visible` of them.
struct Keys {
    int64_t width, visible, depth;
    bool first;
};

// One step of the online softmax for some rows.
template <bool IN_PAIRS>
static void attend_rows(const Buffers &buffers, const Rows &rows, const Keys &keys, int64_t first_row, float scale) {
    const int64_t left = rows.num_rows - first_row, padded = buffers.padded;
    Chunk chunk;
    chunk.first_row = first_row, chunk.num_rows = left < CHUNK ? left : CHUNK;
    const float *queries = buffers.queries + padded * first_row;
    const Product product = {buffers.scores, queries, buffers.keys_t, KEYS, padded, KEYS, chunk.num_rows, keys.depth, nullptr};
    if (keys.width == KEYS)
        multiply<KEYS, false, IN_PAIRS>(product);
    else
        multiply<KEYS / 2, false, IN_PAIRS>(product);
    float *maxima = buffers.maxima + first_row, highest[CHUNK];
    for (int64_t row = 0; row < chunk.num_rows; row++)
        highest[row] = mask_scores(buffers.scores + KEYS * row, keys.visible + (first_row + row) / rows.num_heads);
    raise_maxima(maxima, highest, IN_PAIRS ? scale : 1.0f, chunk);
    for (int64_t row = 0; row < chunk.num_rows; row++)
        soften<IN_PAIRS>(buffers.scores + KEYS * row, buffers.lane_sums + LANES * (first_row + row), maxima[row],
                         chunk.shrink[row], scale);
    const int64_t value_depth = IN_PAIRS ? keys.width / 2 : keys.width;
    if (keys.first)
        add_values<false, IN_PAIRS>(buffers, chunk, value_depth);
    else
        add_values<true, IN_PAIRS>(buffers, chunk, value_depth);
}

template <bool IN_PAIRS>
static void attend_tile(const tw_attend_args &args, const tw_tile &tile, int64_t kv_head) {
    const int64_t seq_end = ((const int32_t *)args.query_start)[tile.seq + 1];
    const int64_t first_position = ((const int32_t *)args.context_lens)[tile.seq] - (seq_end - tile.first_row);
    const int64_t first_of_group = kv_head * args.heads_per_kv_head - args.skipped_heads;
    const int64_t behind_group = first_of_group + args.heads_per_kv_head;
    const int64_t first_head = first_of_group > 0 ? first_of_group : 0;
    const int64_t num_heads = (behind_group < args.num_heads ? behind_group : args.num_heads) - first_head;
    const Rows rows = {tile.first_row, first_head, num_heads, tile.num_tokens * num_heads};
    const Buffers buffers = make_buffers(rows.num_rows, args.head_dim);
    with_kind(args.kind, [&](auto number) { read_queries<decltype(number), IN_PAIRS>(args, rows, buffers); });

    CacheWalk walk(args, tile.seq, kv_head);
    const int64_t num_keys = first_position + tile.num_tokens;
    const int64_t depth = IN_PAIRS ? buffers.padded / 2 : args.head_dim;
    for (int64_t first_key = 0; first_key < num_keys; first_key += KEYS) {
        const int64_t left = num_keys - first_key, width = left > KEYS / 2 ? KEYS : KEYS / 2;
        for (int key = 0; key < width; key += LANES) {
            if constexpr (IN_PAIRS)
                read_keys_in_pairs(args, walk, left - key, buffers, buffers.keys_t + key,
                                   buffers.values + buffers.padded * key / 2);
            else
                with_kind(args.cache_kind, [&](auto number) {
                    float *values = buffers.values + buffers.padded * key;
                    read_keys<decltype(number)>(args, walk, left - key, buffers, buffers.keys_t + key, values);
                });
        }
        const Keys keys = {width, first_position + 1 - first_key, depth, first_key == 0};
        for (int64_t row = 0; row < rows.num_rows; row += CHUNK)
            attend_rows<IN_PAIRS>(buffers, rows, keys, row, (float)args.scale_log2);
    }
    with_kind(args.kind, [&](auto number) { write_results<decltype(number)>(args, rows, buffers); });
}

void tw_attend(const void *attend_args, int64_t start, int64_t stop) {
    const tw_attend_args &args = *(const tw_attend_args *)attend_args;
    const bool in_pairs = PAIRS && args.kind == BFLOAT16 && args.cache_kind == BFLOAT16;
    for (int64_t item = start; item < stop; item++) {
        const tw_tile &tile = ((const tw_tile *)args.tiles)[item / args.num_kv_heads];
        const int64_t kv_head = item % args.num_kv_heads;
        if (in_pairs)
            attend_tile<PAIRS>(args, tile, kv_head);
        else
            attend_tile<false>(args, tile, kv_head);
    }
}

// --- planning -------------------------------------------------------------------------------------------------------

constexpr int BUCKETS = 64;

// Tiles within a factor of two of each other share a bucket; the first buckets have the most keys.
static int bucket_of(int64_t num_keys) { return BUCKETS - 1 - (num_keys > 1 ? 63 - __builtin_clzll((uint64_t)num_keys) : 0); }

// Calls `visit(tile, number of its keys)` for each tile of one sequence.
template <class Visit>
static void visit_tiles(const tw_plan_args &plan, int64_t seq, Visit visit) {
    const int32_t *start = (const int32_t *)plan.query_start + seq;
    const int64_t query_len = start[1] - start[0], context_len = ((const int32_t *)plan.context_lens)[seq];
    for (int64_t first = 0; first < query_len; first += plan.tile_tokens) {
        const int64_t left = query_len - first, num_tokens = left < plan.tile_tokens ? left : plan.tile_tokens;
        visit(tw_tile{seq, start[0] + first, num_tokens}, context_len - query_len + first + num_tokens);
    }
}

static bool is_possible(const tw_plan_args &plan, int64_t seq) {
    const int64_t start = ((const int32_t *)plan.query_start)[seq];
    const int64_t query_len = ((const int32_t *)plan.query_start)[seq + 1] - start;
    const int64_t context_len = ((const int32_t *)plan.context_lens)[seq];
    if (start < 0 || query_len < 0 || context_len < query_len) return false;
    const int64_t num_blocks = (context_len + plan.tokens_per_block - 1) / plan.tokens_per_block;
    if (num_blocks > plan.max_blocks) return false;
    const int32_t *blocks = (const int32_t *)(plan.block_table + seq * plan.table_stride);
    for (int64_t i = 0; i < num_blocks; i++)
        if (blocks[i] < 0 || blocks[i] >= plan.num_blocks) return false;
    return true;
}

int64_t tw_plan_tiles(tw_plan_args *plan) {
    const int32_t *query_start = (const int32_t *)plan->query_start;
    int64_t places[BUCKETS] = {};  // of each bucket's next tile; before that, its number of tiles
    plan->num_tiles = plan->num_keys = 0;
    for (int64_t seq = 0; seq < plan->num_seqs; seq++) {
        if (!is_possible(*plan, seq)) return seq;
        visit_tiles(*plan, seq, [&](tw_tile, int64_t num_keys) {
            places[bucket_of(num_keys)]++;
            plan->num_tiles++;
            plan->num_keys += num_keys;
        });
    }
    if (query_start[0] != 0 || query_start[plan->num_seqs] != plan->num_tokens) return plan->num_seqs;
    int64_t place = 0;
    for (int64_t &bucket : places) {
        const int64_t count = bucket;
        bucket = place;
        place += count;
    }
    for (int64_t seq = 0; seq < plan->num_seqs; seq++)
        visit_tiles(*plan, seq,
                    [&](tw_tile tile, int64_t num_keys) { ((tw_tile *)plan->tiles)[places[bucket_of(num_keys)]++] = tile; });
    return -1;
}
