// Sums over processes that share memory, each in one call: copy in, publish, wait, add, copy out.
//
// Processes share a board: memory that all map, where each owns a line of words and two buffers. The first word of a line
// is the number of its owner's last turn. In a turn a process
//
//     1. waits until all others have published the turn before, so that nobody reads any more what it overwrites,
//     2. writes its buffer of this turn (buffers alternate), and into its line what it calls,
//     3. publishes the turn: stores its number with release order,
//     4. waits for the others' numbers, which it loads with acquire order, and reads their buffers.
//
// Waits are bounded. A kernel whose wait ends early returns its step and is called again with it; no step waits once it
// has begun to write.
#include "shared_sums.h"

#include <time.h>
#include <unistd.h>

#include "numbers.h"

namespace {

struct Line {
    int64_t turn, calls[2];  // two calls, which alternate as the buffers do
};

// A call's operation, number kind and number of elements in one word, which must be equal in all processes.
// kernels/cpu/shared_sums.py has the same layout.
enum Operation : int64_t { ONE_SHOT = 1, TWO_SHOT = 2 };
int64_t call_word(Operation operation, int64_t kind, int64_t num_elems) { return operation << 60 | kind << 56 | num_elems; }

Line *line_of(const tw_board &board, int64_t process) { return (Line *)board.places[process].line; }
char *buffer_of(const tw_board &board, int64_t process, int64_t turn) {
    return (char *)board.places[process].buffers[turn & 1];
}
int64_t load_acquire(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store_release(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// Offers of the core before a waiting process sleeps. A few suit processes of this board that share a core. Where strangers
// want the core, an offer costs a time slice of each, while a sleeper is woken before them: with two cores and a load of
// 15, alternating calls of 2, 4 and 8 processes took 87 to 148, 243 to 430 and 417 to 879 us each with 8 offers, and 388 to
// 918, 932 to 3205 and 1174 to 5998 us with 256.
constexpr int NUM_OFFERS = 8;
constexpr int NAP_US = 1;  // about 15 us in practice

bool all_call(const tw_board &board, int64_t turn, int64_t call) {
    for (int64_t process = 0; process < board.num_processes; process++)
        if (line_of(board, process)->calls[turn & 1] != call) return false;
    return true;
}

// Numbers added at a time. Slices are cut at multiples of it too: they begin on cache lines, whatever the numbers.
constexpr int64_t BLOCK_ELEMS = 64;

// What is added: `offset` bytes into every buffer of a turn, but this process's part where it has it.
struct Parts {
    const tw_board &board;
    int64_t turn, offset;
    const char *own;

    const char *operator[](int64_t process) const {
        return process == board.own ? own : buffer_of(board, process, turn) + offset;
    }
};

template <class Number>
void add_parts(const Parts &parts, char *out, int64_t count) {
    const int64_t num_processes = parts.board.num_processes, bytes = Number::size;
    const int64_t in_blocks = count & -BLOCK_ELEMS;
    for (int64_t at = 0; at < in_blocks; at += BLOCK_ELEMS) {
        F32 total[BLOCK_ELEMS / LANES];
        for (int i = 0; i < BLOCK_ELEMS / LANES; i++) total[i] = Number::load(parts[0] + bytes * (at + LANES * i));
        for (int64_t process = 1; process < num_processes; process++) {
            const char *part = parts[process] + bytes * at;
            for (int i = 0; i < BLOCK_ELEMS / LANES; i++) total[i] = total[i] + Number::load(part + bytes * LANES * i);
        }
        for (int i = 0; i < BLOCK_ELEMS / LANES; i++) Number::store(out + bytes * (at + LANES * i), total[i]);
    }
    for (int64_t at = in_blocks; at < count; at += LANES) {
        F32 total = load_numbers<Number>(parts[0] + bytes * at, count - at);
        for (int64_t process = 1; process < num_processes; process++)
            total = total + load_numbers<Number>(parts[process] + bytes * at, count - at);
        store_numbers<Number>(out + bytes * at, total, count - at);
    }
}

// Each process reads every other's numbers, chunk by chunk. Steps of a chunk: write it and publish; read and add.
template <class Number>
int64_t one_shot(const tw_board &board, const char *x, char *out, int64_t num_elems, int64_t step) {
    const int64_t bytes = Number::size, chunk = board.chunk_bytes / bytes;
    const int64_t call = call_word(ONE_SHOT, Number::kind, num_elems);
    for (; step < 2 * ((num_elems + chunk - 1) / chunk); step++) {
        const int64_t turn = line_of(board, board.own)->turn;
        if (!tw_wait_for_all(&board, turn)) return step;
        const int64_t start = step / 2 * chunk;
        const int64_t count = least(chunk, num_elems - start);
        if (step % 2 == 0) {
            memcpy(buffer_of(board, board.own, turn + 1), x + start * bytes, count * bytes);
            tw_publish(&board, turn + 1, call);
        } else if (!all_call(board, turn, call)) {
            return TW_MISMATCH;
        } else {
            add_parts<Number>({board, turn, 0, x + start * bytes}, out + start * bytes, count);
        }
    }
    return TW_DONE;
}

// Each process adds a slice of every chunk and reads the others' sums. Steps of a chunk: write the others' slices and
// publish; add the own slice in the buffer of the next turn and publish; read the others' sums.
template <class Number>
int64_t two_shot(const tw_board &board, const char *x, char *out, int64_t num_elems, int64_t step) {
    const int64_t bytes = Number::size, chunk = board.chunk_bytes / bytes, own = board.own;
    const int64_t call = call_word(TWO_SHOT, Number::kind, num_elems);
    for (; step < 3 * ((num_elems + chunk - 1) / chunk); step++) {
        const int64_t turn = line_of(board, own)->turn;
        if (!tw_wait_for_all(&board, turn)) return step;
        const int64_t start = step / 3 * chunk;
        const int64_t count = least(chunk, num_elems - start);
        const int64_t slice_blocks = board.num_processes * BLOCK_ELEMS;
        const int64_t length = (count + slice_blocks - 1) / slice_blocks * BLOCK_ELEMS;
        auto slice_start = [&](int64_t process) { return least(process * length, count); };
        const int64_t own_from = slice_start(own), own_to = slice_start(own + 1);
        const char *source = x + start * bytes;
        char *target = out + start * bytes;
        if (step % 3 == 0) {
            char *buffer = buffer_of(board, own, turn + 1);
            memcpy(buffer, source, own_from * bytes);
            memcpy(buffer + own_to * bytes, source + own_to * bytes, (count - own_to) * bytes);
            tw_publish(&board, turn + 1, call);
        } else if (!all_call(board, turn, call)) {
            return TW_MISMATCH;
        } else if (step % 3 == 1) {
            char *sums = buffer_of(board, own, turn + 1);
            add_parts<Number>({board, turn, own_from * bytes, source + own_from * bytes}, sums, own_to - own_from);
            tw_publish(&board, turn + 1, call);
            memcpy(target + own_from * bytes, sums, (own_to - own_from) * bytes);
        } else {
            for (int64_t process = 0; process < board.num_processes; process++) {
                const int64_t from = slice_start(process), to = slice_start(process + 1);
                if (process != own) memcpy(target + from * bytes, buffer_of(board, process, turn), (to - from) * bytes);
            }
        }
    }
    return TW_DONE;
}

int64_t clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

void tw_publish(const tw_board *board, int64_t turn, int64_t call) {
    Line *line = line_of(*board, board->own);
    line->calls[turn & 1] = call;
    store_release(&line->turn, turn);
}

int64_t tw_wait_for(const tw_board *board, int64_t process, int64_t turn) {
    const int64_t *word = &line_of(*board, process)->turn;
    for (int64_t i = 0; i < board->num_spins; i++)
        if (load_acquire(word) >= turn) return 1;
    for (int i = 0; i < NUM_OFFERS; i++) {
        if (load_acquire(word) >= turn) return 1;
        sched_yield();
    }
    for (int64_t i = 0; i < board->num_naps; i++) {
        if (load_acquire(word) >= turn) return 1;
        usleep(NAP_US);
    }
    return load_acquire(word) >= turn;
}

int64_t tw_wait_for_all(const tw_board *board, int64_t turn) {
    for (int64_t process = 0; process < board->num_processes; process++)
        if (!tw_wait_for(board, process, turn)) return 0;
    return 1;
}

int64_t tw_one_shot(const tw_board *board, address x, address out, int64_t num_elems, int64_t kind, int64_t step) {
    return with_kind(
        kind, [&]<class Number>(Number) { return one_shot<Number>(*board, (const char *)x, (char *)out, num_elems, step); });
}

int64_t tw_two_shot(const tw_board *board, address x, address out, int64_t num_elems, int64_t kind, int64_t step) {
    return with_kind(
        kind, [&]<class Number>(Number) { return two_shot<Number>(*board, (const char *)x, (char *)out, num_elems, step); });
}

int64_t tw_make_sum(tw_sums *sums, int64_t index) {
    int64_t *stamps_ns = (int64_t *)sums->stamps_ns + 2 * index;
    stamps_ns[0] = clock_ns();
    ++*(int64_t *)sums->note;
    memcpy((void *)sums->shown, (const void *)sums->note, sums->note_bytes);
    store_release(&sums->num_begun, index + 1);
    const int64_t status = tw_one_shot(sums->board, sums->x, sums->out, sums->num_elems, sums->kind, 0);
    if (status != TW_DONE) {
        store_release(&sums->status, status);
        return 0;
    }
    stamps_ns[1] = clock_ns();
    store_release(&sums->num_done, index + 1);
    return 1;
}

int64_t tw_await_sum(tw_sums *sums, int64_t index) {
    Patience patience;
    while (load_acquire(&sums->num_done) <= index) {
        if (load_acquire(&sums->status) != TW_DONE) return 0;
        patience.wait();
    }
    return 1;
}
