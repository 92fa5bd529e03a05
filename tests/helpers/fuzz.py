"""The seeds of a fuzz test: a few in the suite, as many as ``TIGHTWIRE_FUZZ_CASES`` says in a long run."""

import os


def fuzz_seeds(num_in_suite: int) -> range:
    return range(int(os.environ.get("TIGHTWIRE_FUZZ_CASES", num_in_suite)))
