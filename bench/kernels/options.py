"""The options of ``tightwire bench kernels``."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import OutputOptions, parse_sizes
from tightwire.comm.codec.codec_names import parse_format
from tightwire.option import naming_flag, option

_CODECS = ("int8", "int6", "int5", "int4", "int4-had", "int3-sym", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions(OutputOptions):
    description: ClassVar[str] = "Time codecs against a copy of memory, on one core or a GPU. Checks every answer."
    device: str = option("auto", "device; auto: cuda if torch has it", choices=("auto", "cpu", "cuda"))
    dtype: str = option("bfloat16", "data type of the numbers", choices=("bfloat16", "float16", "float32"))
    codecs: tuple[str, ...] = option(_CODECS, "codecs to time")
    sizes: tuple[int, ...] = option(
        (),
        "bytes of numbers to encode (default: 64KiB to 64MiB; on a CPU to 16MiB)",
        metavar="BYTES,BYTES",
        parse=parse_sizes,
        least=4,
    )
    repeats: int = option(50, "samples of each operation", least=1)
    seconds_per_arm: float = option(
        2.0, "time for the samples of an operation; a slow one gets fewer samples, but at least three", above=0
    )

    def __post_init__(self) -> None:
        with naming_flag("codecs"):
            if None in map(parse_format, self.codecs):
                raise ValueError("none does not quantize, so there is nothing to time; leave it out")
        if wrong := [size for size in self.sizes if size % 4 or size > 1 << 30]:
            raise ValueError(f"--sizes takes multiples of 4 bytes up to 1GiB, got {wrong[0]}")
