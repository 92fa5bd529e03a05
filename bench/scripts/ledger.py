"""Microseconds that the ledger adds to a collective: to count it, and to keep it in a recording as well.

    python bench/scripts/ledger.py [--records 2000] [--rounds 50]

The least and the median of ``rounds`` runs of ``records`` each on one core. Prints one line each, then one JSON line.
"""

import argparse
import json
import sys
import time
from statistics import median

from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.ledger.ledger import Ledger


def us_per_record(ledger: Ledger, num_records: int) -> float:
    start = time.perf_counter()
    for _ in range(num_records):
        ledger.begin("all_reduce", "one-shot", 1152)
        ledger.end(1152)
    return (time.perf_counter() - start) / num_records * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    watch, cells = OthersWatch(), {}
    for name in ("counted", "recorded"):
        ledger = Ledger()
        if name == "recorded":
            ledger.start_recording()
        runs = [us_per_record(ledger, given.records) for _ in range(given.rounds)]
        cells[name] = {"least": round(min(runs), 3), "median": round(median(runs), 3)}
        sys.stdout.write(f"{name}: {min(runs):.2f} us at the least, {median(runs):.2f} in the median\n")
    sys.stdout.write(f"Other processes used {100 * watch.share():.0f} % of the cores meanwhile.\n")
    sys.stdout.write(json.dumps({"benchmark": "ledger", "unit": "us", "cells": cells}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
