"""Tune files: times measured by ``tightwire tune``, one JSON file per kind of host, named by the host's fingerprint."""

import contextlib
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

import tightwire
from tightwire.comm.all_reduce.entry import Setting
from tightwire.whole_folder import write_atomic

SCHEMA = 2
# Of a kernel that sums over peer memory: enough to keep a link busy, and few enough that all run at once.
PEER_BLOCKS = 32


class Host(msgspec.Struct, frozen=True):
    """The properties of a host that measured times depend on."""

    cpu: str
    num_cores: int  # available to this process
    devices: tuple[str, ...]  # names of the CUDA devices that are visible
    torch: str
    tightwire: str

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


class Computing(msgspec.Struct, frozen=True):
    """The median computing time of one algorithm at one size, without messages, on the slowest rank."""

    algorithm: str
    num_bytes: int
    us: float


class Point(Computing, frozen=True):
    """The median time of one algorithm at one size, with messages; ``wire_bytes`` of the rank that sends most."""

    num_calls: int
    wire_bytes: int
    relative_error: float | None


class Measured(msgspec.Struct, frozen=True):
    """What was measured in one setting."""

    setting: Setting
    points: tuple[Point, ...]
    computing: tuple[Computing, ...]  # applies to any transport and link
    wrong: dict[str, str]  # algorithms that summed wrongly, with the error
    date: str  # ISO, UTC
    peer_blocks: int = PEER_BLOCKS  # of the fastest kernels, which the points are of

    def rows(self, *, computing: bool = False) -> dict[str, list[tuple[int, float]]]:
        """Times by algorithm, for ``comm.policy.cost.CostModel``, without wrong algorithms."""
        rows: dict[str, list[tuple[int, float]]] = {}
        for point in sorted(self.computing if computing else self.points, key=lambda point: point.num_bytes):
            if point.algorithm not in self.wrong:
                rows.setdefault(point.algorithm, []).append((point.num_bytes, point.us))
        return rows


class _File(msgspec.Struct, frozen=True):
    schema: int
    host: Host
    settings: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class TuneRecords:
    """The settings measured on a host, and a ``warning`` if an existing file could not be used."""

    settings: tuple[Measured, ...] = ()
    warning: str | None = None

    def of(self, setting: Setting) -> Measured | None:
        return next((measured for measured in self.settings if measured.setting == setting), None)

    def computing_of(self, setting: Setting) -> dict[str, list[tuple[int, float]]]:
        """The latest computing times with the same number of ranks, device and dtype, over any transport."""
        facts = attrgetter("device", "world_size", "dtype")
        alike = [measured for measured in self.settings if facts(measured.setting) == facts(setting)]
        return max(alike, key=lambda measured: measured.date).rows(computing=True) if alike else {}


def this_host(devices: Sequence[str], num_cores: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> Host:
    return Host(_cpu_name(cpuinfo), num_cores, tuple(devices), version("torch"), tightwire.__version__)


def tune_path(cache: Path, host: Host) -> Path:
    return cache / "tune" / f"{host.fingerprint}.json"


def read_tuned(path: Path, host: Host) -> TuneRecords:
    """Read the measurements of ``host``; empty, with a warning, if the file is damaged or from another host."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return TuneRecords()
    except OSError as error:
        return TuneRecords(warning=f"{path} cannot be read ({error.strerror}); costs are predicted instead")
    again = "costs are predicted instead; `tightwire tune` replaces it"
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema != SCHEMA:
            return TuneRecords(warning=f"{path} has schema {schema} and this version reads {SCHEMA}; {again}")
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return TuneRecords(warning=f"{path} is damaged ({error}); {again}")
    if file.host != host:
        return TuneRecords(warning=f"{path} was measured on another host ({file.host.cpu}); {again}")
    if problem := _problem(file.settings):
        return TuneRecords(warning=f"{path} is damaged ({problem}); {again}")
    return TuneRecords(file.settings)


def write_tuned(path: Path, host: Host, new: Sequence[Measured], timeout_s: float = 30.0) -> None:
    """Add ``new`` settings to the file and replace older ones of the same setting; a lock serializes writers.

    Without new ones, only check the folder. Raises OSError if the folder cannot be written, TimeoutError if another
    process holds the lock for ``timeout_s``.
    """
    lock, replaced = path.with_suffix(".lock"), {measured.setting for measured in new}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=timeout_s):
            kept = [measured for measured in read_tuned(path, host).settings if measured.setting not in replaced]
            if new:
                file = _File(SCHEMA, host, (*kept, *new))
                write_atomic(path, msgspec.json.format(msgspec.json.encode(file), indent=1))
    except Timeout:
        raise TimeoutError(
            f"another process has held {lock} for {timeout_s:g} s; end the `tightwire tune` that hangs, and run this "
            "one again"
        ) from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}); measured times are stored there: make it writable, or set "
            "XDG_CACHE_HOME to a folder that is"
        ) from None


class _Schema(msgspec.Struct):
    schema: int


def _problem(settings: Sequence[Measured]) -> str | None:
    for measured in settings:
        for name, row in [*measured.rows().items(), *measured.rows(computing=True).items()]:
            sizes = [num_bytes for num_bytes, _ in row]
            if sizes[0] < 1 or len(set(sizes)) < len(sizes) or not all(us > 0 for _, us in row):
                return f"{name} over {measured.setting.transport} has impossible sizes or times"
    return None


def _cpu_name(cpuinfo: Path) -> str:
    """The kernel's name of the processor, or its numbers if it has no name."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    numbers = (fields.get("CPU implementer"), fields.get("CPU part"))
    return fields.get("model name") or " ".join([platform.machine(), *(number for number in numbers if number)])
