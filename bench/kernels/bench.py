"""``tightwire bench kernels``: GB/s of codecs and of a copy of memory, on one core or one GPU; a wrong answer fails the run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tightwire.bench.kernels.arms import Arm, codec_arms, copy_arm, seconds_per_call
from tightwire.bench.kernels.options import KernelOptions
from tightwire.bench.report.statistics import neighbour_batch
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.sizes import format_bytes

_KIB, _MIB = 1 << 10, 1 << 20
_CPU_SIZES, _CUDA_SIZES = (64 * _KIB, _MIB, 16 * _MIB), (64 * _KIB, _MIB, 8 * _MIB, 64 * _MIB)
_COLUMNS = (
    *(Column("codec", "codec"), Column("operation", "operation")),
    *(Column("us", "seconds", ",.1f", 1e6), Column("GB/s", "bytes_per_s", ",.2f", 1e-9)),
    Column("of copy", "share_of_copy", ".0%"),
    Column("answer", "right", lambda right: "right" if right else "WRONG"),
)


class KernelBench(Bench[KernelOptions]):
    verb = "kernels"
    metrics = (Metric(name="seconds", unit="us", scale=1e6),)
    columns = (Column("name", "name"), Column("size", "size", format_bytes), *_COLUMNS)
    failures = ((ValueError, 2),)

    def __init__(self, options: KernelOptions) -> None:
        super().__init__(options)
        on_cuda = options.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
        self._dtype: torch.dtype = getattr(torch, options.dtype)

    def measure(self) -> None:
        torch.set_num_threads(1)
        options, on_cuda = self.options, self._device.type == "cuda"
        if options.device == "cuda" and not on_cuda:
            raise ValueError("--device cuda: torch finds no CUDA device here")
        name = torch.cuda.get_device_name(self._device) if on_cuda else "one core"
        setting = f"{options.dtype} on {self._device.type} ({name}); a rate counts every byte read and written, once"
        self.facts = {"device": self._device.type, "device_name": name, "dtype": options.dtype, "setting": setting}
        self.print(f"{setting}\n")
        for size in options.sizes or (_CUDA_SIZES if on_cuda else _CPU_SIZES):
            cells = self._codec_cells(size)
            title = f"codecs of {format_bytes(size)}"
            self.print_table(Table(title=title, columns=_COLUMNS, rows=cells, wrong=lambda cell: not cell["right"]))
            self.keep()
        if wrong := [cell["name"] for cell in self.measured if not cell["right"]]:
            raise BenchFailedError(f"wrong answer: {', '.join(wrong)}")

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Codecs", result["setting"]

    def _codec_cells(self, size: int) -> list[dict[str, Any]]:
        """The copy is timed before and after the codecs, and its rate is that of all samples: drift then favors neither.

        Each cell is among the measured ones, with the rate so far, as soon as it is measured.
        """
        copies, cells = self._seconds(copy_arm(size, self._device)), list[dict[str, Any]]()
        for codec in self.options.codecs:
            for arm in codec_arms(codec, size, self._dtype, self._device):
                name = f"{arm.name} {codec} {format_bytes(size)}"
                cells.append(self._cell(arm, name, operation=arm.name, codec=codec, size=size))
                self.measured.append(cells[-1])
                _compare(cells[-1:], 2 * size / statistics.median(copies))
        _compare(cells, 2 * size / statistics.median(copies + self._seconds(copy_arm(size, self._device))))
        return cells

    def _cell(self, arm: Arm, name: str, **facts: Any) -> dict[str, Any]:
        samples = self._seconds(arm)
        seconds = statistics.median(samples)
        facts |= {"seconds": seconds, "bytes_per_s": arm.moved_bytes / seconds, "right": arm.is_right()}
        return {"name": name, **facts, "samples": {"seconds": samples}, "batch": neighbour_batch(len(samples))}

    def _seconds(self, arm: Arm) -> list[float]:
        options = self.options
        return seconds_per_call(arm.call, self._device, repeats=options.repeats, limit_s=options.seconds_per_arm)


def _compare(cells: Sequence[dict[str, Any]], copy_rate: float) -> None:
    for cell in cells:
        cell |= {"copy_bytes_per_s": copy_rate, "share_of_copy": cell["bytes_per_s"] / copy_rate}
