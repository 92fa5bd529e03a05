// Kernels that pass over rows once: RMS norm, rotary embedding with cache writes, SwiGLU and GeGLU, row copies, best numbers.
#include "attention/int8_heads.h"
#include "kernels.h"

namespace {

// 1 / sqrt(mean square + eps), in float64, rounded once.
INLINE F32 inverse_root(double mean_square, double eps) { return splat((float)(1.0 / __builtin_sqrt(mean_square + eps))); }

template <class Number>
F32 squares_of(const char *source, int64_t size, F32 squares = splat(0.0f)) {
    for (int64_t at = 0; at < size; at += LANES) {
        F32 value = load_numbers<Number>(source + Number::size * at, size - at);
        squares = fma(value, value, squares);
    }
    return squares;
}

// Sums are of kind Wide, weights and result of kind Number.
template <class Wide, class Number>
void norm_rows(const tw_norm_args &args, int64_t start, int64_t stop) {
    const int64_t size = args.size, bytes = Wide::size;
    const char *weight = (const char *)args.weight, *x_weight = (const char *)args.x_weight;
    const F32 offset = splat((float)args.offset), x_scale = splat((float)args.scale);
    for (int64_t row = start; row < stop; row++) {
        const char *source = (const char *)args.x + row * args.x_stride;
        F32 squares = splat(0.0f);
        if (args.total) {
            char *total = (char *)args.total + row * size * bytes;
            const char *residual = (const char *)args.residual + row * args.residual_stride;
            F32 root = splat(1.0f);
            if (x_weight) root = inverse_root(sum_lanes(squares_of<Wide>(source, size)) / (double)size, args.eps);
            for (int64_t at = 0; at < size; at += LANES) {
                F32 a = load_numbers<Wide>(source + bytes * at, size - at);
                F32 b = load_numbers<Wide>(residual + bytes * at, size - at);
                if (x_weight) a = a * root * (load_numbers<Number>(x_weight + Number::size * at, size - at) + offset);
                F32 value = Wide::rounded(a * x_scale + b);
                store_rounded<Wide>(total + bytes * at, value, size - at);
                squares = fma(value, value, squares);
            }
            source = total;
        } else {
            squares = squares_of<Wide>(source, size);
        }
        const F32 scale = inverse_root(sum_lanes(squares) / (double)size, args.eps);
        char *out = (char *)args.out + row * size * Number::size;
        for (int64_t at = 0; at < size; at += LANES) {
            F32 value = load_numbers<Wide>(source + bytes * at, size - at);
            if (weight) value = value * scale * (load_numbers<Number>(weight + Number::size * at, size - at) + offset);
            store_rounded<Number>(out + Number::size * at, value, size - at);
        }
    }
}

// RMS norm of `count` heads in place; `mean_square`: of all of them, or null.
template <class Number>
void norm_heads(const tw_rotate_args &args, char *heads, int64_t count, address weight, const float *mean_square) {
    const int64_t size = args.head_dim, head_bytes = size * Number::size;
    const tw_head_norms &norms = args.norms;
    const F32 offset = splat((float)norms.offset);
    F32 squares = splat(0.0f);
    if (norms.whole && !mean_square)
        for (int64_t head = 0; head < count; head++)
            squares = squares_of<Number>(heads + head * args.head_stride, size, squares);
    const double mean = mean_square ? (double)*mean_square : sum_lanes(squares) / (double)(count * size);
    F32 root = inverse_root(mean, norms.eps);
    for (int64_t head = 0; head < count; head++) {
        char *own = heads + head * args.head_stride;
        const char *factors = (const char *)weight + (norms.whole ? head * head_bytes : 0);
        if (!norms.whole) root = inverse_root(sum_lanes(squares_of<Number>(own, size)) / (double)size, norms.eps);
        for (int64_t at = 0; at < size; at += LANES) {
            F32 value = load_numbers<Number>(own + Number::size * at, size - at) * root;
            F32 factor = load_numbers<Number>(factors + Number::size * at, size - at) + offset;
            store_rounded<Number>(own + Number::size * at, value * factor, size - at);
        }
    }
}

// Heads of one token to `slot` of a cache of another kind.
template <class Number>
void store_heads(const tw_rotate_args &args, const char *heads, address cache, int64_t slot) {
    const int64_t size = args.head_dim, in_block = slot % args.tokens_per_block;
    const int64_t page = args.tokens_per_block * cache_head_bytes(args.cache_kind, size);
    char *block = (char *)cache + slot / args.tokens_per_block * args.cache_block_stride;
    for (int64_t head = 0; head < args.num_kv_heads; head++, heads += args.head_stride, block += page) {
        if (args.cache_kind == INT8_HEADS) {
            char *scales = block + args.tokens_per_block * size;
            quantize_head<Number>(heads, size, block + in_block * size, scales + in_block * SCALE_BYTES);
            continue;
        }
        with_kind(args.cache_kind, [&]<class Stored>(Stored) {
            for (int64_t at = 0; at < size; at += LANES) {
                const F32 value = load_numbers<Number>(heads + Number::size * at, size - at);
                store_rounded<Stored>(block + Stored::size * (in_block * size + at), value, size - at);
            }
        });
    }
}

template <class Number>
void rotate_rows(const tw_rotate_args &args, int64_t start, int64_t stop) {
    const bool converts = args.cache_kind != args.kind;
    const int64_t half = args.half, bytes = Number::size, head_bytes = args.head_dim * bytes;
    const int64_t num_rotated = args.num_heads + args.num_kv_heads;
    const int64_t page = converts ? args.head_stride : args.tokens_per_block * head_bytes;
    for (int64_t token = start; token < stop; token++) {
        char *heads = (char *)args.qkv + token * args.token_stride;
        if (args.norms.q_weight) {
            const float *squares = args.norms.mean_squares ? (const float *)args.norms.mean_squares + 2 * token : nullptr;
            norm_heads<Number>(args, heads, args.num_heads, args.norms.q_weight, squares);
            norm_heads<Number>(args, heads + args.num_heads * args.head_stride, args.num_kv_heads, args.norms.k_weight,
                               squares ? squares + 1 : nullptr);
        }
        const char *cosines = (const char *)args.cos + token * args.cos_stride;
        const char *sines = (const char *)args.sin + token * args.sin_stride;
        const int64_t slot = ((const int32_t *)args.slots)[token];
        const int64_t place =
            slot / args.tokens_per_block * args.cache_block_stride + slot % args.tokens_per_block * head_bytes;
        char *queries = (char *)args.queries + token * args.num_heads * head_bytes;
        char *key_heads = heads + args.num_heads * args.head_stride;
        char *keys = converts ? key_heads : (char *)args.k_cache + place, *values = (char *)args.v_cache + place;
        const auto target_of = [&](int64_t head) {
            return head < args.num_heads ? queries + head * head_bytes : keys + (head - args.num_heads) * page;
        };
        for (int64_t at = 0; at < half; at += LANES) {
            const int64_t count = half - at;
            F32 cos = load_numbers<Float32>(cosines + 4 * at, count), sin = load_numbers<Float32>(sines + 4 * at, count);
            for (int64_t head = 0; head < num_rotated; head++) {
                const char *source = heads + head * args.head_stride + bytes * at;
                char *target = target_of(head) + bytes * at;
                F32 first = load_numbers<Number>(source, count);
                F32 second = load_numbers<Number>(source + bytes * half, count);
                store_rounded<Number>(target, first * cos - second * sin, count);
                store_rounded<Number>(target + bytes * half, second * cos + first * sin, count);
            }
        }
        const int64_t turned = 2 * half * bytes;
        for (int64_t head = 0; turned < head_bytes && head < (converts ? args.num_heads : num_rotated); head++)
            memcpy(target_of(head) + turned, heads + head * args.head_stride + turned, head_bytes - turned);
        if (converts) {
            store_heads<Number>(args, key_heads, args.k_cache, slot);
            store_heads<Number>(args, key_heads + args.num_kv_heads * args.head_stride, args.v_cache, slot);
            continue;
        }
        for (int64_t head = 0; head < args.num_kv_heads; head++)
            memcpy(values + head * page, heads + (num_rotated + head) * args.head_stride, head_bytes);
    }
}

template <class Number>
void swiglu_rows(const tw_swiglu_args &args, int64_t start, int64_t stop) {
    const int64_t width = args.width, bytes = Number::size;
    for (int64_t row = start; row < stop; row++) {
        const char *gates = (const char *)args.gate_up + row * args.row_stride;
        char *out = (char *)args.out + row * width * bytes;
        for (int64_t at = 0; at < width; at += LANES) {
            prefetch<2>(gates + bytes * at + 1024), prefetch<2>(gates + bytes * (width + at) + 1024);
            F32 gate = load_numbers<Number>(gates + bytes * at, width - at);
            F32 up = load_numbers<Number>(gates + bytes * (width + at), width - at);
            store_rounded<Number>(out + bytes * at, gated(gate, up, args.gelu), width - at);
        }
    }
}

// A float32's bits as an integer that sorts as it does; zeros are equal, NaN is the largest.
int64_t sortable(float number) {
    int32_t bits = (int32_t)bits_of(number + 0.0f);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) bits = 0x7FC00000;
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

// The column of the first of the largest numbers; -1 if one is infinite or NaN.
int64_t best_finite(const float *x, int64_t num_columns) {
    const int64_t block_columns = 1024;  // only the best block is searched again for the column
    const float infinity = __builtin_inff();
    float best = -infinity;
    int64_t best_block = 0;
    F32 not_zero = splat(0.0f);  // NaN from the first infinity or NaN on
    for (int64_t start = 0; start < num_columns; start += block_columns) {
        const int64_t stop = least(start + block_columns, num_columns);
        F32 block_best = splat(-infinity);
        for (int64_t at = start; at < stop; at += LANES) {
            F32 numbers = load_numbers<Float32>((const char *)(x + at), num_columns - at);
            not_zero = fma(numbers, splat(0.0f), not_zero);
            block_best = maximum(keep_first(numbers, num_columns - at, -infinity), block_best);
        }
        const float largest = max_lanes(block_best);
        if (largest > best) best = largest, best_block = start;
    }
    if (sum_lanes(not_zero) != 0.0f) return -1;
    int64_t column = best_block;
    while (x[column] != best) column++;
    return column;
}

int64_t best_of_any(const float *x, int64_t num_columns) {
    int64_t column = 0;
    for (int64_t at = 1; at < num_columns; at++)
        if (sortable(x[at]) > sortable(x[column])) column = at;
    return column;
}

}  // namespace

void tw_norm(const void *norm_args, int64_t start, int64_t stop) {
    const tw_norm_args &args = *(const tw_norm_args *)norm_args;
    with_kind(args.kind, [&]<class Number>(Number) {
        const auto norm = args.sum_kind == args.kind ? norm_rows<Number, Number> : norm_rows<Float32, Number>;
        norm(args, start, stop);
    });
}

void tw_rotate_and_cache(const void *rotate_args, int64_t start, int64_t stop) {
    const tw_rotate_args &args = *(const tw_rotate_args *)rotate_args;
    with_kind(args.kind, [&]<class Number>(Number) { rotate_rows<Number>(args, start, stop); });
}

void tw_swiglu(const void *swiglu_args, int64_t start, int64_t stop) {
    const tw_swiglu_args &args = *(const tw_swiglu_args *)swiglu_args;
    with_kind(args.kind, [&]<class Number>(Number) { swiglu_rows<Number>(args, start, stop); });
}

void tw_copy_runs(address target, address source, address runs, int64_t num_runs, int64_t row_bytes) {
    const int64_t (*run)[3] = (const int64_t (*)[3])runs;
    for (int64_t i = 0; i < num_runs; i++)
        memcpy((char *)target + run[i][1] * row_bytes, (const char *)source + run[i][0] * row_bytes, run[i][2] * row_bytes);
}

void tw_best_keys(address keys, address x, int64_t stride, int64_t num_rows, int64_t num_columns, int64_t first_id) {
    const int64_t max_id = 0x7FFFFFFF;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *numbers = (const float *)(x + row * stride);
        int64_t column = best_finite(numbers, num_columns);
        if (column < 0) column = best_of_any(numbers, num_columns);
        ((int64_t *)keys)[row] = sortable(numbers[column]) << 32 | (max_id - first_id - column);
    }
}
