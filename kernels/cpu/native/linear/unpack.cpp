// Packed rows back to plain numbers, and rows to panels of interleaved ones.
#include "../kernels.h"
#include "../parallel.h"
#include "interleaved.h"

namespace {

// The blocks of a row; those of an interleaved one are gathered into `scratch`.
template <class Format>
const char *row_blocks(const tw_unpack_args &args, int64_t row, char *scratch) {
    const char *panel = (const char *)args.blocks + args.row_stride * (row / LANES * LANES);
    const int64_t lane = row % LANES;
    if (!is_interleaved(args.kind) || row - lane + LANES > args.num_rows) return panel + args.row_stride * lane;
    for (int64_t at = 0; at < args.num_groups / Format::num_groups; at++)
        move_block<Format, false>((char *)panel + LANES * Format::num_bytes * at, scratch + Format::num_bytes * at, lane);
    return scratch;
}

}  // namespace

void tw_interleave(const void *interleave_args, int64_t start, int64_t stop) {
    const tw_interleave_args &args = *(const tw_interleave_args *)interleave_args;
    with_packed(args.kind, [&]<class Format>(Format) {
        const int64_t num_blocks = args.num_groups / Format::num_groups, row_bytes = Format::num_bytes * num_blocks;
        char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, LANES * row_bytes / 4 + 1);
        for (int64_t panel = start; panel < stop; panel++) {
            char *blocks = (char *)args.blocks + LANES * row_bytes * panel;
            interleave_rows<Format>(scratch, blocks, row_bytes, LANES, num_blocks);
            memcpy(blocks, scratch, LANES * row_bytes);
        }
    });
}

void tw_unpack(const void *unpack_args, int64_t start, int64_t stop) {
    const tw_unpack_args &args = *(const tw_unpack_args *)unpack_args;
    with_packed(args.kind, [&]<class Format>(Format) {
        const int64_t num_blocks = args.num_groups / Format::num_groups;
        char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, Format::num_bytes * num_blocks / 4 + 1);
        with_kind(args.out_kind, [&]<class Number>(Number) {
            for (int64_t row = start; row < stop; row++) {
                const int64_t index = args.indices ? ((const int64_t *)args.indices)[row] : row;
                const char *block = row_blocks<Format>(args, index, scratch);
                char *out = (char *)args.out + Number::size * GROUP * args.num_groups * row;
                for (int64_t at = 0; at < num_blocks; at++, block += Format::num_bytes) {
                    char numbers[4 * GROUP * Format::num_groups];
                    unpack_groups<Format, false>(numbers, block, Format::num_groups, block + UNPACK_AHEAD);
                    for (int each = 0; each < GROUP * Format::num_groups; each += LANES, out += Number::size * LANES)
                        Number::store(out, load(numbers + 4 * each));
                }
            }
        });
    });
}
