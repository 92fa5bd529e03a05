"""``tightwire bench kernels``: GB/s of codecs and of a copy of memory, on one core or one GPU.

The answer of every timed configuration is compared with a reference; a wrong one fails the run.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightwire.bench.kernels.arms import Arm, codec_arms, copy_arm, seconds_per_call
from tightwire.bench.options import OutputOptions, option, parse_sizes
from tightwire.bench.report.statistics import neighbour_batch
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.sizes import format_bytes

_CODECS = ("int8", "int6", "int5", "int4", "int4-had", "int3-sr", "fp8")
_KIB, _MIB = 1 << 10, 1 << 20
_CPU_SIZES, _CUDA_SIZES = (64 * _KIB, _MIB, 16 * _MIB), (64 * _KIB, _MIB, 8 * _MIB, 64 * _MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBenchOptions(OutputOptions):
    device: str = option("auto", "device; auto: cuda if torch has it", choices=("auto", "cpu", "cuda"))
    dtype: str = option("bfloat16", "data type of the numbers", choices=("bfloat16", "float16", "float32"))
    codecs: tuple[str, ...] = option(_CODECS, "codecs to time")
    sizes: tuple[int, ...] = option(
        (),
        "bytes of numbers to encode (default: 64KiB to 64MiB; on a CPU to 16MiB)",
        metavar="SIZE,SIZE",
        parse=parse_sizes,
        least=4,
    )
    repeats: int = option(50, "samples of each operation", least=1)
    seconds_per_arm: float = option(
        2.0, "time for the samples of an operation; a slow one gets fewer samples, but at least three", above=0
    )

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here")
        for name in self.codecs:
            if parse_codec(name).exact:
                raise ValueError(f"codec {name!r} does not quantize; there is nothing to time")
        if wrong := [size for size in self.sizes if size % 4]:
            raise ValueError(f"--sizes takes multiples of 4 bytes, got {wrong[0]}")

    @property
    def torch_device(self) -> torch.device:
        on_cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda", 0) if on_cuda else torch.device("cpu")


_COLUMNS = (
    *(Column("codec", "codec"), Column("operation", "operation")),
    *(Column("us", "seconds", ",.1f", 1e6), Column("GB/s", "bytes_per_s", ",.2f", 1e-9)),
    Column("of copy", "share_of_copy", ".0%"),
    Column("answer", "right", lambda right: "right" if right else "WRONG"),
)


class KernelBench(Bench[KernelBenchOptions]):
    """Exit codes: 0, 1 for a wrong answer, 2 for bad options, 130 after Ctrl-C."""

    verb = "kernels"
    options_type = KernelBenchOptions
    description = "Time codecs against a copy of memory, on one core or a GPU. Checks every answer."
    metrics = (Metric(name="seconds", unit="us", scale=1e6),)
    columns = (Column("name", "name"), Column("size", "size", format_bytes), *_COLUMNS)
    failures = ((ValueError, 2),)

    def __init__(self, options: KernelBenchOptions) -> None:
        super().__init__(options)
        self._device = options.torch_device
        self._dtype: torch.dtype = getattr(torch, options.dtype)

    def measure(self) -> None:
        torch.set_num_threads(1)
        options, on_cuda = self.options, self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if on_cuda else "one core"
        setting = f"{options.dtype} on {self._device.type} ({name}); a rate counts every byte read and written, once"
        self.facts = {"device": self._device.type, "device_name": name, "dtype": options.dtype, "setting": setting}
        self.print(f"{setting}\n")
        for size in options.sizes or (_CUDA_SIZES if on_cuda else _CPU_SIZES):
            cells = self._codec_cells(size)
            self.measured += cells
            title = f"codecs of {format_bytes(size)}"
            self.print_table(Table(title=title, columns=_COLUMNS, rows=cells, wrong=lambda cell: not cell["right"]))
            self.keep()
        if wrong := [cell["name"] for cell in self.measured if not cell["right"]]:
            raise BenchFailedError(f"wrong answer: {', '.join(wrong)}")

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Codecs", result["setting"]

    def _codec_cells(self, size: int) -> list[dict[str, Any]]:
        """The copy is timed before and after the codecs, and its rate is that of all samples: drift then favors neither."""
        first, shown = self._seconds(copy_arm(size, self._device)), format_bytes(size)
        cells = [
            self._cell(arm, f"{arm.name} {codec} {shown}", operation=arm.name, codec=codec, size=size)
            for codec in self.options.codecs
            for arm in codec_arms(codec, size, self._dtype, self._device)
        ]
        rate = 2 * size / statistics.median(first + self._seconds(copy_arm(size, self._device)))
        for cell in cells:
            cell |= {"copy_bytes_per_s": rate, "share_of_copy": cell["bytes_per_s"] / rate}
        return cells

    def _cell(self, arm: Arm, name: str, **facts: Any) -> dict[str, Any]:
        samples = self._seconds(arm)
        seconds = statistics.median(samples)
        return {
            "name": name,
            **facts,
            "seconds": seconds,
            "bytes_per_s": arm.moved_bytes / seconds,
            "right": arm.is_right(),
            "samples": {"seconds": samples},
            "batch": neighbour_batch(len(samples)),
        }

    def _seconds(self, arm: Arm) -> list[float]:
        options = self.options
        return seconds_per_call(arm.call, self._device, repeats=options.repeats, limit_s=options.seconds_per_arm)
