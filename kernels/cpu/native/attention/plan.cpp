// The tiles of a step: every sequence's rows cut into tiles, in the order in which threads should take them.
#include "../kernels.h"

namespace {
constexpr int BUCKETS = 64;

// Tiles within a factor of two of each other share a bucket; the first buckets have the most keys.
int bucket_of(int64_t num_keys) { return BUCKETS - 1 - (num_keys > 1 ? 63 - __builtin_clzll((uint64_t)num_keys) : 0); }

// Calls `visit(tile, number of its keys)` for each tile of one sequence.
void visit_tiles(const tw_plan_args &plan, int64_t seq, auto visit) {
    const int32_t *start = (const int32_t *)plan.query_start + seq;
    const int64_t query_len = start[1] - start[0], context_len = ((const int32_t *)plan.context_lens)[seq];
    for (int64_t first = 0; first < query_len; first += plan.tile_tokens) {
        const int64_t left = query_len - first, num_tokens = left < plan.tile_tokens ? left : plan.tile_tokens;
        visit(tw_tile{seq, start[0] + first, num_tokens}, context_len - query_len + first + num_tokens);
    }
}

bool is_possible(const tw_plan_args &plan, int64_t seq) {
    const int32_t *start = (const int32_t *)plan.query_start + seq;
    const int64_t query_len = (int64_t)start[1] - start[0], context_len = ((const int32_t *)plan.context_lens)[seq];
    if (start[0] < 0 || query_len < 0 || context_len < query_len) return false;
    const int64_t num_blocks = (context_len + plan.tokens_per_block - 1) / plan.tokens_per_block;
    if (num_blocks > plan.max_blocks) return false;
    const int32_t *blocks = (const int32_t *)(plan.block_table + seq * plan.table_stride);
    for (int64_t i = 0; i < num_blocks; i++)
        if (blocks[i] < 0 || blocks[i] >= plan.num_blocks) return false;
    return true;
}
}  // namespace

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
