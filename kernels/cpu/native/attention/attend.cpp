// Paged causal attention that reads keys and values where they lie in the cache.
//
// A tile is at most 96 or 192 query rows (kernels/cpu/attention.py): some tokens of one sequence, times the query heads of one KV
// head. So a block of keys is read once for all. A tile walks its keys in blocks of 64 from position 0 with an online softmax:
//
//     1. widen 64 keys (in 8 bits also add their bias), transpose them, scores = q @ k^T             (q was multiplied by scale * log2(e))
//     2. new maximum; multiply the sums by 2^(old - new); p = 2^(score - new)
//     3. widen 64 values, sums += p @ v
//
// With a window it begins with the first block of keys that its first token sees; with a cap, scores are capped before 2.
//
// With AVX512-BF16 bfloat16 is not widened: two numbers are multiplied and added at once, neighbours of a row for the
// scores, and two keys that follow each other for the values. Scores are scaled after their product then, and p is
// rounded to bfloat16 for step 3, as attention on GPUs does. Matrix units (AMX) take the same pairs, sixteen rows at a time.
//
// A row's bits depend on its own sequence alone: blocks of keys begin at position 0 and are whole (absent keys count as
// zeros), every sum runs in order of position, and the shape of a tile changes no arithmetic. Chunks of a prompt, other
// sequences and the number of threads change nothing.
#include "softmax.h"

namespace {
// The rows of one tile and KV head: row i is token `first_token + i / num_heads`, head `first_head + i % num_heads`.
struct Rows {
    int64_t first_token, first_head, num_heads, num_rows;
};

template <class Number, bool IN_PAIRS>
void read_queries(const tw_attend_args &args, const Rows &rows, const Buffers &buffers) {
    const int64_t padded = buffers.padded, all_rows = rows.num_rows + TALL;
    const F32 scale = splat((float)args.scale_log2);
    memset(buffers.queries + padded * rows.num_rows, 0, 4 * padded * TALL);
    for (int64_t row = 0; row < rows.num_rows; row++) {
        const int64_t token = rows.first_token + row / rows.num_heads, head = rows.first_head + row % rows.num_heads;
        const char *source = (const char *)args.q + token * args.q_token_stride + head * args.q_head_stride;
        float *target = buffers.queries + padded * row;
        if (IN_PAIRS)
            copy_row(source, args.head_dim, padded, (char *)target);
        else
            for (int64_t at = 0; at < padded; at += LANES)
                store(target + at, load_numbers<Number>(source + Number::size * at, args.head_dim - at) * scale);
    }
    memset(buffers.lane_sums, 0, 4 * LANES * all_rows);
    for (int64_t row = 0; row < all_rows; row++) buffers.maxima[row] = MINUS_INFINITY;
}

template <class Number>
void write_results(const tw_attend_args &args, const Rows &rows, const Buffers &buffers) {
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
void add_values(const Buffers &buffers, const Chunk &chunk, int64_t depth) {
    const int64_t padded = buffers.padded;
    float *sums = buffers.sums + padded * chunk.first_row;
    Product product = {sums, buffers.scores, buffers.values, padded, KEYS, padded, chunk.num_rows, depth, chunk.shrink};
    int64_t column = 0;
    for (; column + KEYS <= padded; column += KEYS, product.c += KEYS, product.b += KEYS)
        multiply<KEYS, ACCUMULATE, IN_PAIRS>(product);
    for (; column < padded; column += LANES, product.c += LANES, product.b += LANES)
        multiply<LANES, ACCUMULATE, IN_PAIRS>(product);
}

// Keys that a tile visits together: `width` were read, all or half of a block. The tile's first token sees `visible` of them, but
// those more than `window` before the last.
struct Keys {
    int64_t width, visible, window, depth;
    bool first;
};

// One step of the online softmax for some rows.
template <bool IN_PAIRS>
void attend_rows(const Buffers &buffers, const Rows &rows, const Keys &keys, int64_t first_row, float scale, float cap) {
    const int64_t left = rows.num_rows - first_row, padded = buffers.padded;
    Chunk chunk;
    chunk.first_row = first_row, chunk.num_rows = least(left, CHUNK);
    const float *queries = buffers.queries + padded * first_row;
    const Product product = {buffers.scores, queries, buffers.keys_t, KEYS, padded, KEYS, chunk.num_rows, keys.depth, nullptr};
    (keys.width == KEYS ? multiply<KEYS, false, IN_PAIRS> : multiply<KEYS / 2, false, IN_PAIRS>)(product);
    float *maxima = buffers.maxima + first_row, highest[CHUNK];
    if (cap > 0.0f) {
        for (int64_t row = 0; row < chunk.num_rows; row++)
            cap_scores(buffers.scores + KEYS * row, IN_PAIRS ? scale : 1.0f, cap);
        scale = 1.0f;
    }
    for (int64_t row = 0; row < chunk.num_rows; row++) {
        const int64_t visible = keys.visible + (first_row + row) / rows.num_heads;
        highest[row] = mask_scores(buffers.scores + KEYS * row, keys.window ? visible - keys.window : 0, visible);
    }
    raise_maxima(maxima, highest, IN_PAIRS ? scale : 1.0f, chunk);
    for (int64_t row = 0; row < chunk.num_rows; row++)
        soften<IN_PAIRS>(buffers.scores + KEYS * row, buffers.lane_sums + LANES * (first_row + row), maxima[row],
                         chunk.shrink[row], scale);
    const auto add = keys.first ? add_values<false, IN_PAIRS> : add_values<true, IN_PAIRS>;
    add(buffers, chunk, IN_PAIRS ? keys.width / 2 : keys.width);
}

template <bool IN_PAIRS>
void attend_tile(const tw_attend_args &args, const tw_tile &tile, int64_t kv_head) {
    const int64_t seq_end = ((const int32_t *)args.query_start)[tile.seq + 1];
    const int64_t first_position = ((const int32_t *)args.context_lens)[tile.seq] - (seq_end - tile.first_row);
    const int64_t first_of_group = kv_head * args.heads_per_kv_head - args.skipped_heads;
    const int64_t behind_group = first_of_group + args.heads_per_kv_head;
    const int64_t first_head = most(first_of_group, 0);
    const int64_t num_heads = least(behind_group, args.num_heads) - first_head;
    const Rows rows = {tile.first_row, first_head, num_heads, tile.num_tokens * num_heads};
    const Buffers buffers = make_buffers(rows.num_rows, args.head_dim);
    if constexpr (IN_PAIRS) set_units(rows.num_rows);
    with_kind(args.kind, [&]<class Number>(Number) { read_queries<Number, IN_PAIRS>(args, rows, buffers); });

    const int64_t num_keys = first_position + tile.num_tokens, num_before = first_position + 1 - args.window;
    const int64_t begin = args.window && num_before > 0 ? num_before / KEYS * KEYS : 0;
    CacheWalk walk(args, tile.seq, kv_head, begin, num_keys);
    const int64_t depth = IN_PAIRS ? buffers.padded / 2 : args.head_dim;
    for (int64_t first_key = begin; first_key < num_keys; first_key += KEYS) {
        const int64_t left = num_keys - first_key, width = left > KEYS / 2 ? KEYS : KEYS / 2;
        for (int key = 0; key < width; key += LANES) {
            float *keys_t = buffers.keys_t + key, *values = buffers.values + buffers.padded * (IN_PAIRS ? key / 2 : key);
            const auto read = [&]<class Number>(Number) {
                read_keys<Number, IN_PAIRS>(args, walk, kv_head, left - key, buffers, keys_t, values);
            };
            if (args.cache_kind == INT8_HEADS)
                read(Codes());
            else
                with_kind(args.cache_kind, read);
        }
        const Keys keys = {width, first_position + 1 - first_key, args.window, depth, first_key == begin};
        for (int64_t row = 0; row < rows.num_rows; row += CHUNK)
            attend_rows<IN_PAIRS>(buffers, rows, keys, row, (float)args.scale_log2, (float)args.cap_log2);
    }
    with_kind(args.kind, [&]<class Number>(Number) { write_results<Number>(args, rows, buffers); });
}
}  // namespace

void tw_attend(const void *attend_args, int64_t start, int64_t stop) {
    const tw_attend_args &args = *(const tw_attend_args *)attend_args;
    const bool in_pairs = PAIRS && args.kind == BFLOAT16 && (args.cache_kind == BFLOAT16 || args.cache_kind == INT8_HEADS);
    const auto attend = in_pairs ? attend_tile<PAIRS> : attend_tile<false>;
    for (int64_t item = start; item < stop; item++)
        attend(args, ((const tw_tile *)args.tiles)[item / args.num_kv_heads], item % args.num_kv_heads);
    if (in_pairs) set_units(0);
}
