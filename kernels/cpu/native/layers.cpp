// The layers of a step of few rows as one program: the kernels of a layer, called from a kernel.
//
// A decoder layer of one row is a dozen kernels of a few microseconds each. A call from Python, which allocates the output
// and checks the arguments, costs as much again. Here they follow each other over buffers that stay. A layer has two parts,
// because ranks sum after each:
//
//     part 2l      norm (with the sum before it), q k v, their norms, rotation, cache, attention, output projection
//     part 2l + 1  norm (with the sum before it), gate and up, SwiGLU or GeGLU, down projection
//
// Where those sums are one-shots over shared memory the program makes them too.
//
// A part is a series of phases, a phase a number of items: rows, panels of outputs, tiles of attention. Threads draw a
// phase's items from its counter, and go on when no thread works on it any more. The number of threads is not fixed: one
// that comes late finds nothing to draw and walks through.
//
// A row gets the same bits as from the kernels called one by one.
#include "lora.h"
#include "linear/linear.h"
#include "numbers.h"
#include "shared_sums.h"

namespace {

// Calls `work` with each item that this thread draws, then waits until all threads that came have left.
void run_phase(tw_phase *phase, int64_t num_items, auto work) {
    auto add_one = [](int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST); };
    add_one(&phase->came);
    for (int64_t item = add_one(&phase->next); item < num_items; item = add_one(&phase->next)) work(item);
    add_one(&phase->left);
    // `left` is read first: if it equals `came`, there was a moment when no thread was inside. Later ones find no item.
    for (Patience patience;; patience.wait()) {
        const int64_t left = __atomic_load_n(&phase->left, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&phase->came, __ATOMIC_ACQUIRE) == left) return;
    }
}

// normed = rms_norm(residual); with an update, residual += update first, which may have a norm of its own.
void norm(const tw_layer_program &program, tw_phase *phase, address weight, address update_weight, address update) {
    tw_norm_args args = program.norm;
    args.out = program.normed, args.weight = weight, args.x = update ? update : program.residual;
    if (update) args.total = args.residual = program.residual, args.x_weight = update_weight;
    args.x_stride = args.residual_stride = args.size * size_of(args.sum_kind);
    run_phase(phase, program.num_rows, [&](int64_t row) { tw_norm(&args, row, row + 1); });
}

enum Site { QKV, ATTENTION_OUT, GATE_UP, DOWN };

// out (T, outputs) = x (T, inputs) @ matrix^T + bias + adapters, in numbers of `out_kind`.
//
// The adapters' products with A are the first items. A panel waits for all of them before it adds B's products, which costs
// nothing: other threads compute them while this one multiplies the panel.
void multiply(const tw_layer_program &program, tw_phase *phase, Site site, int64_t layer, const tw_matrix &matrix, address x,
              int64_t num_inputs, address out, int64_t num_outputs, int64_t out_kind) {
    const int64_t kind = program.norm.kind;
    tw_linear_args args = {
        .out = out,
        .num_tokens = program.num_rows,
        .num_outputs = num_outputs,
        .num_inputs = num_inputs,
        .kind = out_kind,
        .bias_kind = kind,
        .in_pairs = PAIRS && kind == BFLOAT16,
    };
    const tw_adapter_args adapters = {
        .site = program.adapter_sites[site],
        .runs = program.adapter_runs,
        .num_runs = program.num_adapter_runs,
        .layer = layer,
        .x = x,
        .shrunk = program.shrunk,
        .out = out,
        .out_kind = out_kind,
    };
    const int64_t num_shrinks = adapters.num_runs ? shrink_items(adapters) : 0;
    const auto panels_of = [](const tw_matrix_part &part) { return (part.num_outputs + PANEL - 1) / PANEL; };
    int64_t num_panels = 0;
    for (int64_t i = 0; i < matrix.num_parts; i++) num_panels += panels_of(matrix.parts[i]);
    run_phase(phase, num_shrinks + num_panels, [&](int64_t item) {
        if (item < num_shrinks) {
            tw_adapter_shrink(&adapters, item, item + 1);
            __atomic_fetch_add(&phase->num_shrunk, 1, __ATOMIC_RELEASE);
            return;
        }
        // Each thread prepares all rows for itself: that costs less than waiting for another.
        if (!args.x)
            args.x = (address)prepare_rows((const char *)x, program.num_rows, num_inputs, kind, matrix.parts[0].kind,
                                           &args.x_stride);
        const tw_matrix_part *part = matrix.parts;
        int64_t panel = item - num_shrinks, first = 0;  // output of the part
        for (; panel >= panels_of(*part); part++) panel -= panels_of(*part), first += part->num_outputs;
        const int64_t begin = PANEL * panel, end = least(begin + PANEL, part->num_outputs);
        const int64_t start = first + begin, stop = first + end;
        if (num_shrinks) prefetch_expand(adapters, start, stop);
        args.weight = part->data, args.weight_stride = part->stride, args.weight_kind = part->kind;
        args.out = out + size_of(out_kind) * first, args.bias = matrix.bias ? matrix.bias + size_of(kind) * first : 0;
        tw_linear(&args, begin, end);
        if (!num_shrinks) return;
        for (Patience patience; __atomic_load_n(&phase->num_shrunk, __ATOMIC_ACQUIRE) < num_shrinks;) patience.wait();
        tw_adapter_expand(&adapters, start, stop);
    });
}

// Rotates queries and keys, and writes keys and values into the cache.
void rotate(const tw_layer_program &program, tw_phase *phase, const tw_layer &layer) {
    run_phase(phase, program.num_rows, [&](int64_t row) {
        const int64_t angles = ((const int32_t *)program.positions)[row] * program.angle_stride;
        tw_rotate_args args = program.rotate;  // strides between rows are not used
        args.head_stride = args.head_dim * size_of(args.kind);
        args.queries = program.rotated + row * args.num_heads * args.head_stride;
        args.qkv = program.qkv + row * (args.num_heads + 2 * args.num_kv_heads) * args.head_stride;
        args.cos = layer.cos + angles, args.sin = layer.sin + angles;
        args.k_cache = layer.k_cache, args.v_cache = layer.v_cache;
        args.slots = program.slots + program.group_slots_stride * layer.group + sizeof(int32_t) * row;
        args.norms.q_weight = layer.q_norm, args.norms.k_weight = layer.k_norm;
        tw_rotate_and_cache(&args, 0, 1);
    });
}

void attend(const tw_layer_program &program, tw_phase *phase, const tw_layer &layer) {
    tw_attend_args args = program.attend;
    args.out = program.mixed, args.q = program.rotated;
    args.q_head_stride = args.head_dim * size_of(args.kind), args.q_token_stride = args.num_heads * args.q_head_stride;
    args.k_cache = layer.k_cache, args.v_cache = layer.v_cache;
    args.block_table += program.group_table_stride * layer.group;
    args.window = layer.window;
    args.key_bias.bias = layer.key_bias, args.key_bias.cos = layer.cos, args.key_bias.sin = layer.sin;
    run_phase(phase, program.num_tiles * args.num_kv_heads, [&](int64_t item) { tw_attend(&args, item, item + 1); });
}

void run_attention(const tw_layer_program &program, int64_t index, tw_phase *phases, address update) {
    const tw_layer &layer = program.layers[index];
    const tw_attend_args &sizes = program.attend;
    const int64_t hidden_size = program.norm.size, mixed_size = sizes.num_heads * sizes.head_dim;
    const int64_t qkv_size = mixed_size + 2 * sizes.num_kv_heads * sizes.head_dim;
    norm(program, &phases[0], layer.attention_norm, layer.attention_update_norm, update);
    multiply(program, &phases[1], QKV, index, layer.qkv, program.normed, hidden_size, program.qkv, qkv_size, sizes.kind);
    rotate(program, &phases[2], layer);
    attend(program, &phases[3], layer);
    multiply(program, &phases[4], ATTENTION_OUT, index, layer.attention_out, program.mixed, mixed_size, program.partial,
             hidden_size, program.norm.sum_kind);
}

void run_mlp(const tw_layer_program &program, int64_t index, tw_phase *phases, address update) {
    const tw_layer &layer = program.layers[index];
    const int64_t hidden_size = program.norm.size;
    tw_swiglu_args gates = program.swiglu;
    gates.out = program.gated, gates.gate_up = program.gate_up, gates.row_stride = 2 * gates.width * size_of(gates.kind);
    norm(program, &phases[5], layer.mlp_norm, layer.mlp_update_norm, update);
    multiply(program, &phases[6], GATE_UP, index, layer.gate_up, program.normed, hidden_size, program.gate_up, 2 * gates.width,
             gates.kind);
    run_phase(&phases[7], program.num_rows, [&](int64_t row) { tw_swiglu(&gates, row, row + 1); });
    multiply(program, &phases[8], DOWN, index, layer.down, program.gated, gates.width, program.partial, hidden_size,
             program.norm.sum_kind);
}

void run_thread(const tw_parts_args &args, bool makes_sums) {
    const tw_layer_program &program = *args.program;
    address update = args.update;
    for (int64_t part = args.first; part < args.stop; part++) {
        tw_phase *phases = program.phases + TW_PHASES_PER_LAYER * (part / 2);
        (part % 2 ? run_mlp : run_attention)(program, part / 2, phases, update);
        update = program.partial;
        if (args.sums) {
            // The thread that makes the sums was in every phase: `partial` holds what the others have drawn.
            const int64_t index = part - args.first_summed;
            if (!(makes_sums ? tw_make_sum(args.sums, index) : tw_await_sum(args.sums, index))) return;
            update = args.sums->out;
        }
    }
}

}  // namespace

void tw_run_parts(const void *parts_args, int64_t start, int64_t stop) {
    for (int64_t thread = start; thread < stop; thread++) run_thread(*(const tw_parts_args *)parts_args, thread == 0);
}
