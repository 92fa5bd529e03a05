"""``tightwire bench kernels``: GB/s of block quantization beside a copy of the same run, and what AllReduce kernels cost.

Every timed configuration's answer is compared with the reference; a wrong one fails the run. On CPU the codec's kernels
are timed on one core; the AllReduce kernels need a GPU.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tightwire.bench.ending import say
from tightwire.bench.kernels.arms import OPERATIONS, codec_arms, copy_arm
from tightwire.bench.kernels.timing import seconds_per_call
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import ResultFiles, add_flags
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.sizes import format_bytes, parse_bytes

SCHEMA = "tightwire.bench.kernels/1"

_CODECS = "int8,int6,int5,int4,int4-had,int3-sr,fp8"
_CPU_SIZES, _CUDA_SIZES = "64KiB,1MiB,16MiB", "64KiB,1MiB,8MiB,64MiB"
_RANK_SIZES = "8KiB,64KiB,512KiB,4MiB,64MiB"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CSV_COLUMNS = [
    *("name", "size", "codec", "algorithm", "ranks", "operation"),
    *("seconds", "bytes_per_s", "share_of_copy", "right"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBenchOptions:
    """What to time; sizes are bytes of numbers before they are encoded."""

    device: torch.device
    dtype: str
    codecs: tuple[str, ...]
    sizes: tuple[int, ...]
    rank_sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    repeats: int
    seconds_per_arm: float
    output: Path | None
    label: str


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer, 2 for bad options, 130 after Ctrl-C."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    console = make_console()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "label": options.label,
        **_facts(options),
        "codecs": [],
        "all_reduces": [],
        "files": [],
    }
    try:
        files = None if options.output is None else ResultFiles(options.output, options.label, ("json", "csv"))
        console.print(result["setting"], "\n", soft_wrap=True)
        for size in options.sizes:
            rows = list(_codec_rows(options, size))
            result["codecs"] += rows
            _show_codecs(console, size, rows)
        if options.device.type == "cuda":
            for world_size in options.ranks:
                rows = list(_rank_rows(options, world_size))
                result["all_reduces"] += rows
                _show_ranks(console, world_size, rows)
        else:
            console.print("the AllReduce kernels need a GPU, and were not timed\n")
    except ValueError as error:
        say("kernels", str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    wrong = [row["name"] for row in result["codecs"] + result["all_reduces"] if not row["right"]]
    result["error"] = f"wrong answers: {', '.join(wrong)}" if wrong else None
    if files is not None:
        _keep(files, result)
        result["files"] = files.paths
    sys.stdout.write(json.dumps(_without_samples(result)) + "\n")
    for name in wrong:
        sys.stderr.write(f"tightwire bench kernels: wrong answer: {name}\n")
    return 1 if wrong else 0


def parse_options(argv: Sequence[str]) -> KernelBenchOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = argparse.ArgumentParser(
        prog="tightwire bench kernels",
        description="Time block quantization against a copy of memory and, on a GPU, the AllReduce kernels with several "
        "buffers of one process as ranks. Checks every answer. The last line of stdout is one JSON object.",
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of the numbers (%(default)s)")
    add("--codecs", default=_CODECS, metavar="NAME,NAME", help="%(default)s")
    add("--sizes", metavar="SIZE,SIZE", help=f"of numbers to encode ({_CUDA_SIZES}; on CPU {_CPU_SIZES})")
    add("--rank-sizes", default=_RANK_SIZES, metavar="SIZE,SIZE", help="of messages to sum (%(default)s)")
    add("--ranks", default="2,4", metavar="N,N", help="ranks that are played (%(default)s)")
    add("--repeats", type=int, default=50, metavar="N", help="samples of each (%(default)s)")
    add(
        "--seconds-per-arm",
        type=float,
        default=2.0,
        metavar="S",
        help="fewer samples, but three, where it takes longer",
    )
    add_flags(parser, "kernels", "JSON (raw samples included) and CSV")
    given = parser.parse_args(argv)
    has_cuda = torch.cuda.is_available()
    if given.device == "cuda" and not has_cuda:
        parser.error("--device cuda: torch finds no CUDA device here")
    kind = given.device if given.device != "auto" else ("cuda" if has_cuda else "cpu")
    try:
        codecs = tuple(given.codecs.split(","))
        for name in codecs:
            if parse_codec(name).exact:
                raise ValueError(f"codec {name!r} does not quantize; there is nothing to time")
        options = KernelBenchOptions(
            device=torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"),
            dtype=given.dtype,
            codecs=codecs,
            sizes=_parse_sizes(given.sizes or (_CUDA_SIZES if kind == "cuda" else _CPU_SIZES)),
            rank_sizes=_parse_sizes(given.rank_sizes),
            ranks=tuple(int(count) for count in given.ranks.split(",")),
            repeats=given.repeats,
            seconds_per_arm=given.seconds_per_arm,
            output=given.output,
            label=given.label,
        )
        if options.repeats < 1 or min(options.ranks) < 2:
            raise ValueError("--repeats must be at least 1 and --ranks at least 2")
        check_label(options.label)
    except ValueError as error:
        parser.error(str(error))
    return options


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_bytes(part) for part in text.split(","))
    for size in sizes:
        if size <= 0 or size % 4:
            raise ValueError(f"a size is a positive multiple of 4 bytes, got {size}")
    return sizes


def _facts(options: KernelBenchOptions) -> dict[str, Any]:
    on_cuda = options.device.type == "cuda"
    name = torch.cuda.get_device_name(options.device) if on_cuda else "one core"
    setting = f"{options.dtype} on {options.device.type} ({name}); a rate counts every byte read and written, once"
    return {
        "environment": describe_environment(),
        "device": options.device.type,
        "device_name": name,
        "dtype": options.dtype,
        "setting": setting,
    }


def _codec_rows(options: KernelBenchOptions, size: int) -> Iterator[dict[str, Any]]:
    """The copy before and after the codecs: its rate is the mean of both, so that a drift does not favor anybody."""
    first = _seconds(options, copy_arm(size, options.device).call)
    rows = []
    for codec in options.codecs:
        for arm in codec_arms(codec, size, _DTYPES[options.dtype], options.device):
            samples = _seconds(options, arm.call)
            seconds = statistics.median(samples)
            rows.append(
                {
                    "name": f"{arm.name} {codec} {format_bytes(size)}",
                    "operation": arm.name,
                    "codec": codec,
                    "size": size,
                    "seconds": seconds,
                    "bytes_per_s": arm.moved_bytes / seconds,
                    "right": arm.is_right(),
                    "samples_s": samples,
                }
            )
    samples = first + _seconds(options, copy_arm(size, options.device).call)
    copy_bytes_per_s = 2 * size / statistics.median(samples)
    for row in rows:
        yield {**row, "copy_bytes_per_s": copy_bytes_per_s, "share_of_copy": row["bytes_per_s"] / copy_bytes_per_s}


def _rank_rows(options: KernelBenchOptions, world_size: int) -> Iterator[dict[str, Any]]:
    # Imports Triton, which a CPU host may not have.
    from tightwire.bench.kernels.ranks import ALGORITHMS, PlayedRanks

    ranks = PlayedRanks(world_size, options.device)
    for size in options.rank_sizes:
        for algorithm in ALGORITHMS:
            arm = ranks.arm(algorithm, size, _DTYPES[options.dtype])
            samples = _seconds(options, arm.call)
            yield {
                "name": f"{algorithm} {format_bytes(size)} over {world_size}",
                "algorithm": algorithm,
                "ranks": world_size,
                "size": size,
                "seconds": statistics.median(samples),
                "right": arm.is_right(),
                "samples_s": samples,
            }


def _seconds(options: KernelBenchOptions, call: Any) -> list[float]:
    return seconds_per_call(call, options.device, repeats=options.repeats, limit_s=options.seconds_per_arm)


def _show_codecs(console: Console, size: int, rows: list[dict[str, Any]]) -> None:
    copy = rows[0]["copy_bytes_per_s"] / 1e9
    table = Table(title=f"{format_bytes(size)}: GB/s (share of copy's {copy:,.1f})", title_justify="left")
    table.add_column("codec")
    for operation in OPERATIONS:
        table.add_column(operation, justify="right")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        cells = {row["operation"]: row for row in rows if row["codec"] == codec}
        table.add_row(codec, *(_rate(cells[operation]) for operation in OPERATIONS))
    console.print(table, "")


def _rate(row: dict[str, Any]) -> str:
    text = f"{row['bytes_per_s'] / 1e9:,.2f} ({row['share_of_copy']:.0%})"
    return text if row["right"] else f"[red]{text} WRONG[/red]"


def _show_ranks(console: Console, world_size: int, rows: list[dict[str, Any]]) -> None:
    title = f"{world_size} ranks played by buffers and streams of one process on one device: us a call, no link"
    table = Table(title=title, title_justify="left")
    table.add_column("size")
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    for algorithm in algorithms:
        table.add_column(algorithm, justify="right")
    for size in dict.fromkeys(row["size"] for row in rows):
        cells = {row["algorithm"]: row for row in rows if row["size"] == size}
        texts = [
            f"{cells[name]['seconds'] * 1e6:,.1f}{'' if cells[name]['right'] else ' WRONG'}" for name in algorithms
        ]
        table.add_row(format_bytes(size), *texts)
    console.print(table, "")


def _keep(files: ResultFiles, result: dict[str, Any]) -> None:
    files.write_json(result)
    files.write_csv(_CSV_COLUMNS, result["codecs"] + result["all_reduces"])


def _without_samples(result: dict[str, Any]) -> dict[str, Any]:
    def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "samples_s"} for row in rows]

    return {**result, "codecs": plain(result["codecs"]), "all_reduces": plain(result["all_reduces"])}
