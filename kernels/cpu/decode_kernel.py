"""A forward pass of a few rows as one program, on CPU: the kernels of a layer, called from a kernel.

A decoder layer of one row is a dozen kernels of a few microseconds each. Called from Python, with the output allocated and
the arguments checked, each costs as much again. Here they follow each other over buffers that stay. A layer has two
parts, because ranks sum after each:

    part 2l      norm (with the sum before it), q k v, rotation, cache, attention, output projection
    part 2l + 1  norm (with the sum before it), gate and up, SwiGLU, down projection

Where those sums are one-shots over shared memory the program makes them too (``shared_sums``), and goes on.

A part is made of phases, a phase of items: rows, panels of outputs, tiles of attention. Threads that are given the same
program draw a phase's items from its counter, and go on to the next when nobody is at work on this one any more. How many
threads there are is nowhere fixed: one that comes late finds phases done and walks through them.

Numbers are made by the same functions as for many rows, in the same order, rounded at the same places: a row gets the
same bits either way. Knows addresses, not tensors; ``model.decode_program`` is the host.
"""

from tightwire.kernels.cpu.attention_kernels import attend
from tightwire.kernels.cpu.kv_cache import write_slots
from tightwire.kernels.cpu.linear import PANEL, come_in_pairs, multiply, prepare_rows
from tightwire.kernels.cpu.norm import rms_norm_rows
from tightwire.kernels.cpu.rope import rope_rows
from tightwire.kernels.cpu.shared_sums import OUT, await_sum, make_sum
from tightwire.kernels.cpu.swiglu import swiglu_rows
from tightwire.kernels.cpu.vector.atomics import load_acquire, yield_core
from tightwire.kernels.cpu.vector.jit import helper, kernel
from tightwire.kernels.cpu.vector.numbers import size_of
from tightwire.kernels.cpu.vector.simd import fetch_add, load_i32, load_i64

# Integers of a program: sizes, then addresses, and strides in bytes.
(
    NUM_ROWS,
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEADS_PER_KV_HEAD,
    SKIPPED_HEADS,  # of the first KV head's, which another rank has
    HEAD_DIM,
    MLP_SIZE,
    KIND,
    RESIDUAL,  # (T, D); where a part's norm leaves the sum that it normalized
    NORMED,  # (T, D)
    QKV,  # (T, (H + 2 K) E)
    ROTATED,  # (T, H + K, E)
    MIXED,  # (T, H, E)
    GATE_UP,  # (T, 2 F)
    GATED,  # (T, F)
    PARTIAL,  # (T, D); what a part ends with
    COS,  # (positions, E / 2) float32, as are sines
    SIN,
    ANGLE_STRIDE,
    POSITIONS,  # (T,) int32, as are slots
    SLOTS,
    NUM_BLOCKS,
    TOKENS_PER_BLOCK,
    CACHE_BLOCK_STRIDE,
    QUERY_START,  # (B + 1,) int32
    CONTEXT_LENS,  # (B,) int32
    BLOCK_TABLE,  # (B, M) int32
    TABLE_STRIDE,
    TILES,  # of ``attention_cpu_plan``
    NUM_TILES,
    PHASES,  # of every part, _PHASE_BYTES each, all zero at the start
    PROGRAM_INTS,
) = range(33)

# Integers of a layer. A matrix has an address, the stride of its rows, its kind, and the address of its bias or 0.
MATRIX_INTS = 4
ATTENTION_NORM, MLP_NORM, KEYS, VALUES = range(4)
QKV_MATRIX, OUT_MATRIX, GATE_UP_MATRIX, DOWN_MATRIX = range(4, 4 + 4 * MATRIX_INTS, MATRIX_INTS)
LAYER_INTS = 4 + 4 * MATRIX_INTS

PHASES_PER_LAYER = 9
PHASE_BYTES = 64  # a cache line: the next item, how many threads came, how many left
_CAME, _LEFT = 8, 16

_SPINS = 2000  # some 20 us: a phase is shorter, unless its last thread was made to wait for a core


@kernel
def run_parts(
    program: int,
    layers: int,
    first: int,
    stop: int,
    update: int,
    eps: float,
    scale_log2: float,
    sums: int,
    first_summed: int,
    scratch: int,
    scratch_stride: int,
    thread: int,
) -> None:
    """Parts ``first`` to ``stop``, together with whatever threads run the same; ``update`` is the last part's sum, or 0.

    ``sums``: a table of ``shared_sums``, by which sum 0 is made of what part ``first_summed`` ends with, and so on up to one
    that is left; 0: nothing is summed, or the caller does it. ``scratch``: room for each thread, ``scratch_stride`` bytes. Thread 0
    makes the sums.
    """
    scratch += thread * scratch_stride
    for part in range(first, stop):
        layer = layers + 8 * LAYER_INTS * (part // 2)
        phase = load_i64(program + 8 * PHASES) + PHASE_BYTES * PHASES_PER_LAYER * (part // 2)
        if part % 2 == 0:
            _attention(program, layer, phase, update, eps, scale_log2, scratch)
        else:
            _mlp(program, layer, phase + 5 * PHASE_BYTES, update, eps, scratch)
        if sums == 0:
            update = load_i64(program + 8 * PARTIAL)
        else:
            # Thread 0 was in every phase, so all that the others had drawn is in ``PARTIAL`` now.
            number = part - first_summed
            done = make_sum(sums, number) if thread == 0 else await_sum(sums, number)
            if not done:
                return
            update = load_i64(sums + 8 * OUT)


@helper
def _attention(program: int, layer: int, phase: int, update: int, eps: float, scale_log2: float, scratch: int) -> None:
    num_rows = load_i64(program + 8 * NUM_ROWS)
    num_heads = load_i64(program + 8 * NUM_HEADS)
    num_kv_heads = load_i64(program + 8 * NUM_KV_HEADS)
    head_dim = load_i64(program + 8 * HEAD_DIM)
    kind = load_i64(program + 8 * KIND)
    hidden_size = load_i64(program + 8 * HIDDEN_SIZE)
    qkv = load_i64(program + 8 * QKV)
    mixed = load_i64(program + 8 * MIXED)
    head_bytes = head_dim * size_of(kind)
    qkv_stride = (num_heads + 2 * num_kv_heads) * head_bytes
    rotated_stride = (num_heads + num_kv_heads) * head_bytes

    _norm(program, load_i64(layer + 8 * ATTENTION_NORM), phase, update, eps)
    _matrix(
        layer + 8 * QKV_MATRIX,
        phase + PHASE_BYTES,
        load_i64(program + 8 * NORMED),
        num_rows,
        hidden_size,
        (num_heads + 2 * num_kv_heads) * head_dim,
        qkv,
        kind,
        scratch,
    )
    _rotate(program, layer, phase + 2 * PHASE_BYTES, qkv_stride, rotated_stride)

    attending = phase + 3 * PHASE_BYTES
    fetch_add(attending + _CAME)
    attend(
        mixed,
        load_i64(program + 8 * ROTATED),
        rotated_stride,
        head_bytes,
        kind,
        load_i64(layer + 8 * KEYS),
        load_i64(layer + 8 * VALUES),
        load_i64(program + 8 * CACHE_BLOCK_STRIDE),
        kind,
        load_i64(program + 8 * QUERY_START),
        load_i64(program + 8 * CONTEXT_LENS),
        load_i64(program + 8 * BLOCK_TABLE),
        load_i64(program + 8 * TABLE_STRIDE),
        load_i64(program + 8 * TOKENS_PER_BLOCK),
        num_heads,
        num_kv_heads,
        load_i64(program + 8 * HEADS_PER_KV_HEAD),
        load_i64(program + 8 * SKIPPED_HEADS),
        head_dim,
        scale_log2,
        load_i64(program + 8 * TILES),
        load_i64(program + 8 * NUM_TILES),
        attending,
        scratch,
        0,
        0,
    )
    _leave(attending)
    _matrix(
        layer + 8 * OUT_MATRIX,
        phase + 4 * PHASE_BYTES,
        mixed,
        num_rows,
        num_heads * head_dim,
        hidden_size,
        load_i64(program + 8 * PARTIAL),
        kind,
        scratch,
    )


@helper
def _mlp(program: int, layer: int, phase: int, update: int, eps: float, scratch: int) -> None:
    num_rows = load_i64(program + 8 * NUM_ROWS)
    hidden_size = load_i64(program + 8 * HIDDEN_SIZE)
    mlp_size = load_i64(program + 8 * MLP_SIZE)
    kind = load_i64(program + 8 * KIND)
    gate_up = load_i64(program + 8 * GATE_UP)
    gated = load_i64(program + 8 * GATED)

    _norm(program, load_i64(layer + 8 * MLP_NORM), phase, update, eps)
    _matrix(
        layer + 8 * GATE_UP_MATRIX,
        phase + PHASE_BYTES,
        load_i64(program + 8 * NORMED),
        num_rows,
        hidden_size,
        2 * mlp_size,
        gate_up,
        kind,
        scratch,
    )
    gating = phase + 2 * PHASE_BYTES
    fetch_add(gating + _CAME)
    row = fetch_add(gating)
    while row < num_rows:
        swiglu_rows(gated, gate_up, 2 * mlp_size * size_of(kind), mlp_size, kind, row, row + 1)
        row = fetch_add(gating)
    _leave(gating)
    _matrix(
        layer + 8 * DOWN_MATRIX,
        phase + 3 * PHASE_BYTES,
        gated,
        num_rows,
        mlp_size,
        hidden_size,
        load_i64(program + 8 * PARTIAL),
        kind,
        scratch,
    )


@helper
def _norm(program: int, weight: int, phase: int, update: int, eps: float) -> None:
    """Row by row: normed = rms_norm(residual), or with an update residual += update first."""
    num_rows = load_i64(program + 8 * NUM_ROWS)
    size = load_i64(program + 8 * HIDDEN_SIZE)
    kind = load_i64(program + 8 * KIND)
    residual = load_i64(program + 8 * RESIDUAL)
    normed = load_i64(program + 8 * NORMED)
    stride = size * size_of(kind)
    fetch_add(phase + _CAME)
    row = fetch_add(phase)
    while row < num_rows:
        if update == 0:
            rms_norm_rows(normed, 0, residual, stride, 0, 0, weight, eps, size, kind, row, row + 1)
        else:
            rms_norm_rows(normed, residual, update, stride, residual, stride, weight, eps, size, kind, row, row + 1)
        row = fetch_add(phase)
    _leave(phase)


@helper
def _rotate(program: int, layer: int, phase: int, qkv_stride: int, rotated_stride: int) -> None:
    """Row by row: turn queries and keys, and put keys and values into the cache."""
    num_rows = load_i64(program + 8 * NUM_ROWS)
    num_heads = load_i64(program + 8 * NUM_HEADS)
    num_kv_heads = load_i64(program + 8 * NUM_KV_HEADS)
    head_dim = load_i64(program + 8 * HEAD_DIM)
    kind = load_i64(program + 8 * KIND)
    angle_stride = load_i64(program + 8 * ANGLE_STRIDE)
    head_bytes = head_dim * size_of(kind)
    fetch_add(phase + _CAME)
    row = fetch_add(phase)
    while row < num_rows:
        source = load_i64(program + 8 * QKV) + row * qkv_stride
        target = load_i64(program + 8 * ROTATED) + row * rotated_stride
        angles = load_i32(load_i64(program + 8 * POSITIONS) + 4 * row) * angle_stride
        rope_rows(
            target,
            source,
            qkv_stride,
            head_bytes,
            load_i64(program + 8 * COS) + angles,
            angle_stride,
            load_i64(program + 8 * SIN) + angles,
            angle_stride,
            num_heads + num_kv_heads,
            head_dim // 2,
            kind,
            0,
            1,
        )
        write_slots(
            target + num_heads * head_bytes,
            rotated_stride,
            head_bytes,
            source + (num_heads + num_kv_heads) * head_bytes,
            qkv_stride,
            head_bytes,
            load_i64(layer + 8 * KEYS),
            load_i64(layer + 8 * VALUES),
            load_i64(program + 8 * CACHE_BLOCK_STRIDE),
            load_i64(program + 8 * SLOTS) + 4 * row,
            1,
            load_i64(program + 8 * NUM_BLOCKS),
            num_kv_heads,
            load_i64(program + 8 * TOKENS_PER_BLOCK),
            head_bytes,
        )
        row = fetch_add(phase)
    _leave(phase)


@helper
def _matrix(
    matrix: int, phase: int, x: int, num_rows: int, depth: int, num_outputs: int, out: int, kind: int, scratch: int
) -> None:
    """out (rows, outputs) = x (rows, depth) @ matrix^T + bias, panel by panel."""
    fetch_add(phase + _CAME)
    # Each thread for itself: that costs less than waiting for others to have done it.
    prepared, stride = prepare_rows(x, num_rows, depth, kind, scratch)
    start = PANEL * fetch_add(phase)
    while start < num_outputs:
        multiply(
            out,
            prepared,
            stride,
            load_i64(matrix),
            load_i64(matrix + 8),
            load_i64(matrix + 16),
            load_i64(matrix + 24),
            num_rows,
            num_outputs,
            depth,
            kind,
            come_in_pairs(kind),
            start,
            min(start + PANEL, num_outputs),
        )
        start = PANEL * fetch_add(phase)
    _leave(phase)


@helper
def _leave(phase: int) -> None:
    """To be called when the phase's counter has passed its last item: waits until all that came have left.

    Those who come after that find nothing to draw. Who left is read before who came, so equal numbers mean that at some
    moment nobody was inside.
    """
    fetch_add(phase + _LEFT)
    spins = 0
    while True:
        left = load_acquire(phase + _LEFT)
        if load_acquire(phase + _CAME) == left:
            return
        spins += 1
        if spins > _SPINS:
            yield_core()
