// Waiting for other threads of one kernel. Sums inside other kernels are tw_make_sum and tw_await_sum (kernels.h).
#pragma once
#include <sched.h>

#include "kernels.h"

// Between two looks at what another thread writes: nothing at first (2000 looks are about 20 us), then offers of the core.
struct Patience {
    int looks = 0;
    void wait() {
        if (looks == 2000)
            sched_yield();
        else
            looks++;
    }
};
