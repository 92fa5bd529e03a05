// Parallel regions on torch's OpenMP threads, and per-thread scratch memory.
//
// torch's threads spin for some milliseconds behind each of torch's products. Threads of our own would share the cores with
// them: attention behind a product takes as long on two such threads as on one.
#include "parallel.h"

#include <pthread.h>
#include <stdlib.h>

namespace {

typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);
GompParallel gomp_parallel;

struct Job {
    tw_kernel kernel;
    const void *arguments;
    int64_t next, num_items, step;
};

void work(void *data) {
    Job *job = (Job *)data;
    for (;;) {
        int64_t start = __atomic_fetch_add(&job->next, job->step, __ATOMIC_RELAXED);
        if (start >= job->num_items) return;
        int64_t stop = start + job->step < job->num_items ? start + job->step : job->num_items;
        job->kernel(job->arguments, start, stop);
    }
}

struct Scratch {
    float *floats;
    int64_t size;
};
thread_local Scratch scratch[SCRATCH_USES];

// Frees a thread's scratch memory when the thread ends. (A C++ destructor would need libstdc++.)
void free_scratch(void *buffers) {
    for (int use = 0; use < SCRATCH_USES; use++) {
        Scratch &own = ((Scratch *)buffers)[use];
        free(own.floats);
        own = {nullptr, 0};
    }
}
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
void make_scratch_key() {
    if (pthread_key_create(&scratch_key, free_scratch)) abort();
}

}  // namespace

void tw_set_parallel(address function) { gomp_parallel = (GompParallel)function; }

void tw_run(tw_kernel kernel, const void *arguments, int64_t num_items, int64_t step, int64_t num_threads) {
    if (num_threads < 2 || !gomp_parallel) return kernel(arguments, 0, num_items);
    Job job = {kernel, arguments, 0, num_items, step};
    gomp_parallel(work, &job, (unsigned)num_threads, 0);
}

float *thread_scratch(ScratchUse use, int64_t num_floats) {
    Scratch &own = scratch[use];
    if (own.size < num_floats) {
        pthread_once(&scratch_once, make_scratch_key);
        if (pthread_setspecific(scratch_key, scratch)) abort();
        free(own.floats);
        void *memory = nullptr;
        if (posix_memalign(&memory, 64, sizeof(float) * num_floats)) abort();
        own = {(float *)memory, num_floats};
    }
    return own.floats;
}

const char *tw_source_hash(void) { return TW_SOURCE_HASH; }
