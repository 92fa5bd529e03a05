// The online softmax of some rows of a tile.
#pragma once
#include "keys.h"

namespace {
constexpr float MINUS_INFINITY = -__builtin_inff();

// Rows of a tile that take a step together.
struct Chunk {
    int64_t first_row, num_rows;
    float shrink[CHUNK];  // 2^(old maximum - new maximum) of each row
};

// Scores of a row, times `factor`, become cap * tanh(score / cap).
INLINE void cap_scores(float *scores, float factor, float cap) {
    UNROLL_FOR (int i = 0; i < KEYS / LANES; i++) {
        F32 e[] = {load(scores + LANES * i) * splat(2.0f * factor / cap)};
        exp(e);
        store(scores + LANES * i, splat(cap) - splat(2.0f * cap) / (e[0] + splat(1.0f)));
    }
}

constexpr float LOWEST = -1e30f;  // the largest score of a row that sees none: finite, because inf - inf is not a number

// Masks a row's scores before `first` and from `visible` on, and returns the largest.
INLINE float mask_scores(float *scores, int64_t first, int64_t visible) {
    for (int64_t key = 0; key < first && key < KEYS; key++) scores[key] = MINUS_INFINITY;
    F32 high[KEYS / LANES];
    UNROLL_FOR (int i = 0; i < KEYS / LANES; i++) {
        high[i] = load(scores + LANES * i);
        if (visible < KEYS) {
            high[i] = keep_first(high[i], visible - LANES * i, MINUS_INFINITY);
            store(scores + LANES * i, high[i]);
        }
    }
    const float highest = max_lanes(maximum(maximum(high[0], high[1]), maximum(high[2], high[3])));
    return first > 0 && highest < LOWEST ? LOWEST : highest;
}

// The step's new maxima; a NaN stays.
void raise_maxima(float *maxima, const float *highest, float scale, Chunk &chunk) {
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
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        p[i] = load(scores + LANES * i);
        if (IN_PAIRS) p[i] = p[i] * splat(scale);
        p[i] = p[i] - splat(maximum);
    }
    exp2(p);
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        if (IN_PAIRS)
            BFloat16::store_rounded((char *)scores + 2 * LANES * i, p[i]);
        else
            store(scores + LANES * i, p[i]);
    }
    F32 total = (p[0] + p[1]) + (p[2] + p[3]);
    store(lane_sums, fma(load(lane_sums), splat(shrink), total));
}
}  // namespace
