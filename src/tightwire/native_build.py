"""Compiles the CPU kernels: one shared library for each instruction-set level.

The build hook of the package runs this while installing, without Tightwire's dependencies; ``library`` runs it when the
sources of a checkout are newer than its library. Standard library only.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

_KERNELS = (Path(__file__).parent / "kernels" / "cpu").resolve()  # in a checkout a link leads there
SOURCES, BUILT = _KERNELS / "native", _KERNELS / "built"

# Compiler options of each level, the best one last. A level's CPU flags are those of /proc/cpuinfo.
LEVELS = {
    "x86_64": {
        "v3": (["-march=x86-64-v3"], {"avx2", "fma", "f16c"}),
        "v4": (["-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
        "v4-bf16": (["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"], {"avx512_bf16", "avx512_vnni"}),
        "v4-amx": (
            ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
            {"amx_tile", "amx_bf16", "amx_int8"},
        ),
    },
    "aarch64": {
        "neon": (["-march=armv8.2-a+fp16"], {"asimdhp", "atomics"}),
        "neon-dot": (["-march=armv8.2-a+fp16+dotprod"], {"asimddp"}),
    },
}
ZIG_NAMES = {
    "-march=x86-64-v3": "-march=x86_64_v3",
    "-march=x86-64-v4": "-march=x86_64_v4",
    "-march=armv8.2-a+fp16": "-mcpu=generic+v8_2a+fullfp16",
    "-march=armv8.2-a+fp16+dotprod": "-mcpu=generic+v8_2a+fullfp16+dotprod",
}
# No option may reorder or contract float operations: equal inputs give equal bits at every level.
_FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    # Wrong alarms of GCC: vectors in arguments, registers filled in parts, fields left out because they are 0.
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-missing-field-initializers"),
]
# The longest time for one compiler call: ten times that of the slowest file with sanitizers on a busy core.
DEADLINE_S = 600.0
_VERSION_S = 60.0  # for a compiler to say its version
_FOLDER_PREFIX = "building-"
_SANITIZE = ["-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
# The checks of addresses find what these two would, and inline they take three times as long to compile as calls.
_SANITIZE += ["-fno-sanitize=null,object-size", "--param=asan-instrumentation-with-call-threshold=0"]


class NoCompilerError(RuntimeError):
    """No C++ compiler was found."""


def machine_levels() -> dict[str, tuple[list[str], set[str]]]:
    """The levels of this machine's architecture, the best one last; empty on one that has no kernels."""
    return LEVELS.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine()), {})


def usable_levels() -> list[str]:
    """The levels that this CPU can run, the best one last."""
    usable, flags = [], _cpu_flags()
    for level, (_, needed) in machine_levels().items():
        if not needed <= flags or ("amx_tile" in needed and not _may_use_tiles()):
            break
        usable.append(level)
    return usable


def _may_use_tiles() -> bool:
    """Ask Linux for the registers of matrix units, which each process must (ARCH_REQ_XCOMP_PERM of XTILEDATA)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def source_hash() -> str:
    """A hash of all sources and of this file's compiler options."""
    options = [options for levels in LEVELS.values() for options, _ in levels.values()]
    digest = hashlib.sha256(repr((options, _FLAGS)).encode())
    for file in sorted(SOURCES.rglob("*")):
        if file.suffix in (".h", ".cpp"):
            digest.update(file.relative_to(SOURCES).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, g++ 12 or newer, clang++, or ``ziglang``'s; else raises NoCompilerError."""
    if named := os.environ.get("CXX"):
        return named.split()
    for name in ("g++", "clang++", "c++"):
        if (path := shutil.which(name)) and _is_recent(path):
            return [path]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-nostdlib++"]
    raise NoCompilerError(
        "no C++ compiler: install g++ 12 or newer or clang++ (Debian, Ubuntu: apt install g++), "
        f"or the package ziglang ({sys.executable} -m pip install ziglang)"
    )


def _is_recent(compiler: str) -> bool:
    asked = [compiler, "-dumpversion"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):  # it is no program, or does not end
        return False
    major = answer.stdout.partition(".")[0].strip()
    return answer.returncode == 0 and major.isdigit() and int(major) >= 12


def platform_tag() -> str:
    """The platform of a wheel with these libraries, such as ``linux_x86_64``."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def library_path(level: str, *, sanitize: bool = False) -> Path:
    return BUILT / f"kernels-{level}{'-sanitize' if sanitize else ''}.so"


def build(level: str, *, sanitize: bool = False) -> Path:
    """Compile one level into ``library_path(level)`` in about 15 s of CPU, files in parallel.

    Only a complete library replaces one that exists. Raises NoCompilerError without a compiler, RuntimeError with its output
    if it fails or cannot be run.
    """
    compiler, target = find_compiler(), library_path(level, sanitize=sanitize)
    target.parent.mkdir(exist_ok=True)
    _remove_old_folders()
    options, _ = machine_levels()[level]
    if compiler[1:2] == ["-m"]:
        options = [ZIG_NAMES.get(option, option) for option in options]
    command = [*compiler, *_FLAGS, *(_SANITIZE if sanitize else []), *options, f'-DTW_SOURCE_HASH="{source_hash()}"']
    with (
        TemporaryDirectory(dir=target.parent, prefix=_FOLDER_PREFIX) as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = {str(file): f"{folder}/{number}.o" for number, file in enumerate(sorted(SOURCES.rglob("*.cpp")))}
        list(pool.map(lambda file: _run([*command, "-c", file, "-o", objects[file]]), objects))
        complete = Path(folder) / target.name
        _run([*command, *objects.values(), "-o", str(complete)])
        complete.replace(target)
    return target


def _remove_old_folders() -> None:
    """Remove what builds left behind that were killed. A younger folder may be in use: the build hook takes no lock."""
    for folder in BUILT.glob(f"{_FOLDER_PREFIX}*"):
        if folder.stat().st_mtime < time.time() - 2 * DEADLINE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    except OSError as error:  # $CXX may name a program that does not exist
        raise RuntimeError(f"the C++ compiler {command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"compiling the CPU kernels took more than {DEADLINE_S:g} s: {' '.join(command)}") from error
    if done.returncode != 0:
        raise RuntimeError(f"compiling the CPU kernels failed: {' '.join(command)}\n{done.stderr[-4000:]}")
