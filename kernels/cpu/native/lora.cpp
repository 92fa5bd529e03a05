// Low-rank adapters: shrunk = x A^T, then out += shrunk B, for rows of several adapters and of none.
//
// Both products sum in float32, each output in one fixed order, so a row has the same bits with any other rows.
#include "lora.h"

#include "linear/linear.h"

namespace {

constexpr int64_t PANEL_OUTPUTS = 64;  // that lie together in B

const tw_adapter &adapter_of(const tw_adapter_args &args, const tw_adapter_run &run) { return args.site->entries[run.entry]; }
// The panel of B whose first output is `output`, of this layer; `output` may be the number of outputs: the end of B.
const char *panel_of(const tw_adapter_args &args, const tw_adapter_run &run, int64_t output) {
    const tw_adapter_site &site = *args.site;
    const tw_adapter &adapter = adapter_of(args, run);
    const int64_t num_outputs = site.part_stops[site.num_parts - 1];
    return (const char *)adapter.b + (args.layer * num_outputs + output) * adapter.rank * size_of(site.kind);
}
float *shrunk_rows(const tw_adapter_args &args, const tw_adapter_run &run) {
    return (float *)args.shrunk + run.first_row * args.site->most_width;
}

void shrink(const tw_adapter_args &args, const tw_adapter_run &run, int64_t first) {
    const tw_adapter_site &site = *args.site;
    const tw_adapter &adapter = adapter_of(args, run);
    const int64_t width = site.num_parts * adapter.rank, row_bytes = site.num_inputs * size_of(site.kind);
    if (first >= width) return;
    const char *x = (const char *)args.x + run.first_row * row_bytes;
    tw_linear_args product = {
        .out = (address)shrunk_rows(args, run),
        .weight = adapter.a + args.layer * width * row_bytes,
        .weight_stride = row_bytes,
        .weight_kind = site.kind,
        .num_tokens = run.num_rows,
        .num_outputs = width,
        .num_inputs = site.num_inputs,
        .kind = FLOAT32,
        .bias_kind = FLOAT32,
        .in_pairs = PAIRS && site.kind == BFLOAT16,
    };
    product.x = (address)prepare_rows(x, run.num_rows, site.num_inputs, site.kind, site.kind, &product.x_stride);
    tw_linear(&product, first, least(first + SHRINK_OUTPUTS, width));
}

// out (ROWS, VECTORS of sixteen) += shrunk (ROWS, rank) B; of the last vector, `count` numbers if VECTORS is 1.
template <class Number, class Out, int ROWS, int VECTORS>
void add_tile(char *out, int64_t out_stride, const float *shrunk, int64_t width, const char *b, int64_t b_stride, int64_t rank,
              int64_t count) {
    F32 sums[ROWS][VECTORS];
    UNROLL_FOR (int row = 0; row < ROWS; row++)
        UNROLL_FOR (int i = 0; i < VECTORS; i++) sums[row][i] = splat(0.0f);
    for (int64_t j = 0; j < rank; j++, b += b_stride) {
        F32 weights[VECTORS];
        UNROLL_FOR (int i = 0; i < VECTORS; i++)
            weights[i] = VECTORS > 1 ? Number::load(b + Number::size * LANES * i) : load_numbers<Number>(b, count);
        UNROLL_FOR (int row = 0; row < ROWS; row++) {
            const F32 value = splat(shrunk[row * width + j]);
            UNROLL_FOR (int i = 0; i < VECTORS; i++) sums[row][i] = fma(value, weights[i], sums[row][i]);
        }
    }
    UNROLL_FOR (int row = 0; row < ROWS; row++)
        UNROLL_FOR (int i = 0; i < VECTORS; i++) {
            char *target = out + out_stride * row + Out::size * LANES * i;
            if (VECTORS > 1)
                Out::store(target, Out::load(target) + sums[row][i]);
            else
                store_numbers<Out>(target, load_numbers<Out>(target, count) + sums[row][i], count);
        }
}

// `add_tile` of some rows for `count` outputs of a panel.
template <class Number, class Out, int ROWS>
void add_rows(char *out, int64_t out_stride, const float *shrunk, int64_t width, const char *b, int64_t b_stride, int64_t rank,
              int64_t count) {
    constexpr int VECTORS = WIDE ? 4 : 2;
    int64_t at = 0;
    for (; count - at >= VECTORS * LANES; at += VECTORS * LANES)
        add_tile<Number, Out, ROWS, VECTORS>(out + Out::size * at, out_stride, shrunk, width, b + Number::size * at, b_stride,
                                             rank, LANES);
    for (; at < count; at += LANES)
        add_tile<Number, Out, ROWS, 1>(out + Out::size * at, out_stride, shrunk, width, b + Number::size * at, b_stride, rank,
                                       least(LANES, count - at));
}

// Adds to all rows of a run the outputs from `start` to `stop`, which are of one part and one panel.
template <class Number, class Out>
void expand(const tw_adapter_args &args, const tw_adapter_run &run, int64_t part, int64_t start, int64_t stop) {
    const tw_adapter_site &site = *args.site;
    const int64_t num_outputs = site.part_stops[site.num_parts - 1], rank = adapter_of(args, run).rank,
                  width = site.num_parts * rank;
    const int64_t panel = start / PANEL_OUTPUTS * PANEL_OUTPUTS, out_stride = num_outputs * Out::size, count = stop - start;
    const int64_t b_stride = least(PANEL_OUTPUTS, num_outputs - panel) * Number::size;
    const char *b = panel_of(args, run, panel) + Number::size * (start - panel);
    for (int64_t row = 0, rows; row < run.num_rows; row += rows) {
        const int64_t left = run.num_rows - row;
        char *out = (char *)args.out + (run.first_row + row) * out_stride + Out::size * start;
        const float *shrunk = shrunk_rows(args, run) + row * width + part * rank;
        rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const auto add = rows == 4 ? add_rows<Number, Out, 4> : rows == 2 ? add_rows<Number, Out, 2> : add_rows<Number, Out, 1>;
        add(out, out_stride, shrunk, width, b, b_stride, rank, count);
    }
}

}  // namespace

void tw_adapter_shrink(const void *adapter_args, int64_t start, int64_t stop) {
    const tw_adapter_args &args = *(const tw_adapter_args *)adapter_args;
    if (!args.num_runs) return;
    const int64_t per_run = shrink_items(args) / args.num_runs;
    for (int64_t item = start; item < stop; item++) shrink(args, args.runs[item / per_run], SHRINK_OUTPUTS * (item % per_run));
}

void tw_adapter_expand(const void *adapter_args, int64_t start, int64_t stop) {
    const tw_adapter_args &args = *(const tw_adapter_args *)adapter_args;
    const tw_adapter_site &site = *args.site;
    with_kind(site.kind, [&]<class Number>(Number) {
        with_kind(args.out_kind, [&]<class Out>(Out) {
            for (int64_t i = 0; i < args.num_runs; i++) {
                if (!adapter_of(args, args.runs[i]).rank) continue;
                for (int64_t part = 0; part < site.num_parts; part++) {
                    const int64_t first = most(start, part ? site.part_stops[part - 1] : 0);
                    const int64_t last = least(stop, site.part_stops[part]);
                    for (int64_t at = first, end; at < last; at = end) {
                        end = least(last, (at / PANEL_OUTPUTS + 1) * PANEL_OUTPUTS);
                        expand<Number, Out>(args, args.runs[i], part, at, end);
                    }
                }
            }
        });
    });
}

void prefetch_expand(const tw_adapter_args &args, int64_t start, int64_t stop) {
    const tw_adapter_site &site = *args.site;
    const int64_t first = start / PANEL_OUTPUTS * PANEL_OUTPUTS;
    const int64_t end = least((stop + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * PANEL_OUTPUTS, site.part_stops[site.num_parts - 1]);
    for (int64_t i = 0; i < args.num_runs; i++) {
        const char *stop_at = panel_of(args, args.runs[i], end);
        for (const char *at = panel_of(args, args.runs[i], first); at < stop_at; at += LINE_BYTES) prefetch<2>(at);
    }
}
