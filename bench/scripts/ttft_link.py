"""Time to first token over slower and slower wires: what quantizing the AllReduce is worth, and where it stops paying.

    sudo python bench/scripts/ttft_link.py [MODEL] [--links 100mbit,200mbit,500mbit,1gbit] [--prompt-len 512] [--output DIR]
    sudo python bench/scripts/ttft_link.py [MODEL] --find-share 0.7 [--prompt-len 512]

For every link ``tightwire bench ttft`` runs on a server of its own. For each link and AllReduce:

    share     of TTFT that the best lossless AllReduce takes there, inside the server
    speed-up  of TTFT at the client against that best lossless one, with its bootstrap 95 % interval; and by formula
    bound     computing + bytes over the link's measured rate, and with coding too; TTFT over each

and for each quantized AllReduce the bandwidth at which it stops paying: measured, where the time it saves, a straight line
in 1 / bandwidth between two links, crosses zero (or would, by the line through all of them, then marked as extrapolated),
and as the policy's cost model predicts it for the AllReduces of this prompt: from what `tightwire tune` measured of this
host's computing, if it was run, or from seeds. ``--find-share`` looks for the link on which the baseline's AllReduce takes
that share of TTFT, and ends; a longer prompt has about the same share there, for its computing and its bytes grow alike.
Flags after ``--`` go to `bench ttft` as they are. Prints Markdown; the last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from link_sweep import HEAD, crossovers, rows_of, show, show_crossovers
from link_sweep_page import make_page
from link_sweep_time import least_wire_s

from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.result_files import ResultFiles
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.link.link import parse_link
from tightwire.comm.policy.setting import ELEM_BYTES, Setting
from tightwire.comm.policy.tune_file import read_tuned, this_host, tune_path
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.server.config.engine import EngineOptions
from tightwire.server.plan.devices import num_cores

_BENCH = (sys.executable, "-m", "tightwire", "bench", "ttft")
_MOST_TRIES = 4  # of --find-share; times change linearly with 1 / bandwidth, so two are enough on a quiet machine
_TRY_REPEATS = 2  # a share is a matter of seconds: no interval is wanted


class NothingMeasuredError(RuntimeError):
    """`bench ttft` brought no cell on a link; the message has its command and its reason."""


class Sweep:
    """The runs of one command: what is common to them, and what each has brought."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self.faults: list[str] = []

    def run(self, link: str, algorithms: str, repeats: int) -> dict[str, Any]:
        """One link: the result of `bench ttft` with the facts that it keeps in its file.

        Raises:
            NothingMeasuredError: such as on a link that this machine does not carry.
        """
        given = self._given
        command = [*_BENCH, given.model, "--link", link, "--link-emulation", given.link_emulation]
        command += ["--algorithms", algorithms, "--prompt-lens", str(given.prompt_len), "--concurrency", "1"]
        command += ["--repeats", str(repeats), "--tp", str(given.tp), "--nodes", str(given.nodes)]
        command += ["--max-num-batched-tokens", str(given.max_num_batched_tokens), "--device", "cpu"]
        command += ["--output", str(self._folder), "--label", _file_name(link), *given.flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = done.stdout.splitlines()
        line = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"cells": [], "files": []}
        if not line["cells"]:
            raise NothingMeasuredError(
                f"{' '.join(command)}\nmeasured nothing: {line.get('error', f'exit {done.returncode}')}"
            )
        if line["error"]:
            self.faults.append(f"{link}: {line['error']}")
        (path,) = (path for path in line["files"] if path.endswith(".json"))
        return line | {"comm": json.loads(Path(path).read_text())["comm"]}


def find_share(sweep: Sweep, given: argparse.Namespace) -> dict[str, Any]:
    """The link on which the baseline's AllReduce takes about ``--find-share`` of TTFT, and the tries that led there."""
    link, tries = given.links.split(",")[0], []
    baseline = split_all_reduce_names(given.algorithms)[0]
    for _ in range(_MOST_TRIES):
        row = rows_of(sweep.run(link, f"{baseline},{baseline}", _TRY_REPEATS), link)[0]
        tries.append({key: row[key] for key in ("link", "bytes_per_s", "arm", "ttft_s", "share", "wire_s")})
        sys.stdout.write(f"{link}: {baseline} takes {row['share']:.1%} of TTFT ({row['ttft_s'] * 1e3:.0f} ms)\n")
        sys.stdout.flush()
        if abs(row["share"] - given.find_share) <= given.within:
            break
        total_s, waiting_s = row["server_ttft_s"], row["share"] * row["server_ttft_s"]
        other_s, beside_s = total_s - waiting_s, waiting_s - row["wire_s"]
        wanted_s = given.find_share / (1 - given.find_share) * other_s - beside_s
        if wanted_s <= 0:
            raise SystemExit(
                f"no link is fast enough: {waiting_s - row['wire_s']:.3f} s of AllReduce are not the wire's"
            )
        asked = parse_link(link).bytes_per_s or row["bytes_per_s"]
        link = f"{asked * row['wire_s'] / wanted_s * 8 / 1e6:.1f}mbit"
    return {"share": given.find_share, "link": tries[-1]["link"], "found": tries[-1]["share"], "tries": tries}


def _file_name(link: str) -> str:
    return link.replace("/", "p").replace("=", "-").replace(",", "-")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--links", default="100mbit,200mbit,500mbit,1gbit")
    parser.add_argument("--link-emulation", default="auto", choices=("auto", "namespaces", "user-space"))
    parser.add_argument("--algorithms", default="two-shot,native,flash-int8,flash-int6,flash-int4")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineOptions().max_num_batched_tokens)
    parser.add_argument("--find-share", type=float, metavar="SHARE")
    parser.add_argument("--within", type=float, default=0.02, metavar="SHARE")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--label", default="ttft-link")
    given = parser.parse_args(argv[:end])
    given.flags = list(argv[end + 1 :])
    return given


def sweep_links(sweep: Sweep, given: argparse.Namespace, files: ResultFiles | None) -> dict[str, Any]:
    """Every link in turn; what there is so far is kept after each."""
    result: dict[str, Any] = {
        "schema": "tightwire.bench.ttft-link/1",
        "environment": describe_environment(),
        "label": given.label,
        "model": given.model,
        "options": {key: value for key, value in vars(given).items() if key != "output"},
        "rows": [],
        "crossovers": [],
        "error": None,
    }
    host = this_host([], num_cores())
    tuned = read_tuned(tune_path(cache_folder(), host), host)
    least = f"at least {least_wire_s(given) / 60:.0f} minutes for the bytes; computing and starting servers come on top"
    sys.stderr.write(f"ttft_link: {least}\n")
    sys.stdout.write(HEAD)
    for link in given.links.split(","):
        try:
            one = sweep.run(link, given.algorithms, given.repeats)
        except NothingMeasuredError as error:
            sweep.faults.append(f"{link}: {error}")
            sys.stderr.write(f"ttft_link: {link} is left out: {error}\n")
            continue
        finally:
            result["error"] = "; ".join(sweep.faults) or None
        rows = rows_of(one, link)
        show(rows)
        result["rows"] += rows
        result["message_bytes"] = min(given.prompt_len, given.max_num_batched_tokens) * one["hidden_size"]
        result["message_bytes"] *= ELEM_BYTES[one["dtype"]]
        setting = Setting(one["comm"]["transport"], one["device"], given.tp, given.nodes, one["dtype"])
        computing = tuned.computing_of(setting)
        result["crossovers"] = crossovers(result["rows"], setting, result["message_bytes"], computing)
        if files is not None:
            files.write_json(result)
    if files is not None and result["rows"]:
        files.write_json(result)
        files.write_html(make_page(result))
    show_crossovers(result["crossovers"])
    return result


def main() -> int:
    given = _parse(sys.argv[1:])
    files = None
    if given.output is not None and given.find_share is None:
        try:
            files = ResultFiles(given.output, given.label, kinds=("json", "html"))
        except ValueError as error:
            sys.stderr.write(f"ttft_link: {error}\n")
            return 1
    with tempfile.TemporaryDirectory(prefix="ttft-link-") as folder:
        sweep = Sweep(given, Path(folder) if given.output is None else given.output)
        try:
            result = find_share(sweep, given) if given.find_share else sweep_links(sweep, given, files)
        except NothingMeasuredError as error:
            sys.stderr.write(f"ttft_link: {error}\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("ttft_link: interrupted; what was measured of whole links is kept\n")
            return 130
    sys.stdout.write(json.dumps(result | {"files": files.paths if files else []}) + "\n")
    return 1 if sweep.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
