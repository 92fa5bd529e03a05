"""The seeds of a fuzz test: a few in the suite, half of them in `make sanitize`, ``TIGHTWIRE_FUZZ_CASES`` in a long run."""

import os


def fuzz_seeds(num_in_suite: int) -> range:
    num_seeds = num_in_suite // 2 if os.environ.get("TIGHTWIRE_KERNELS") == "sanitize" else num_in_suite
    return range(int(os.environ.get("TIGHTWIRE_FUZZ_CASES", num_seeds)))
