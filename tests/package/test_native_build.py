"""Building the library: levels by CPU, compilers, failures that leave the old library, and what the hook builds."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tightwire import native_build as build

V3 = {"avx2", "fma", "f16c"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16", "avx512_vnni"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ({"sse2"}, []),
        (V3, ["v3"]),
        (V3 | {"avx512_bf16", "avx512_vnni"}, ["v3"]),  # a virtual machine may hide the levels between
        (V4, ["v3", "v4"]),
        (BF16, ["v3", "v4", "v4-bf16"]),
        (BF16 | {"amx_tile", "amx_bf16", "amx_int8"}, ["v3", "v4", "v4-bf16", "v4-amx"]),
    ],
)
def test_usable_levels_follow_the_cpu(flags: set[str], levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(build, "_may_use_tiles", lambda: True)
    assert build.usable_levels() == levels


def test_usable_levels_of_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    for features, levels in (
        ("fp asimd", []),  # a Cortex-A72
        ("fp asimd atomics asimdhp", ["neon"]),
        ("fp asimd atomics asimdhp asimddp sve", ["neon", "neon-dot"]),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
        monkeypatch.setattr(build, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
        assert build.usable_levels() == levels


def test_matrix_units_that_linux_does_not_grant_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_cpu_flags", lambda: BF16 | {"amx_tile", "amx_bf16", "amx_int8"})
    monkeypatch.setattr(build, "_may_use_tiles", lambda: False)
    assert build.usable_levels()[-1] == "v4-bf16"


def test_an_unknown_architecture_has_no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert build.usable_levels() == [] and build.machine_levels() == {}


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from tightwire import native_build; print(native_build.source_hash())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == build.source_hash() + "\n"


def _fake_compiler(folder: Path, name: str, version: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {version}\n")
    (folder / name).chmod(0o755)


def test_compilers_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(build.NoCompilerError, match=r"install g\+\+ 12 or newer .* or the package ziglang"):
        build.find_compiler()
    monkeypatch.setattr(build, "_VERSION_S", 1.0, raising=False)
    for unusable in ("#!/bin/sh\necho 11\n", "#!/bin/sh\nexec /bin/sleep 60\n", "not a program"):
        (tmp_path / "g++").write_text(unusable)
        (tmp_path / "g++").chmod(0o755)
        with pytest.raises(build.NoCompilerError):
            build.find_compiler()
    monkeypatch.setattr(build, "find_spec", lambda name: object())
    assert build.find_compiler()[1:] == ["-m", "ziglang", "c++", "-nostdlib++"]
    _fake_compiler(tmp_path, "clang++", "16.0.6")
    assert build.find_compiler() == [str(tmp_path / "clang++")]
    _fake_compiler(tmp_path, "g++", "12")
    assert build.find_compiler() == [str(tmp_path / "g++")]
    monkeypatch.setenv("CXX", "ccache g++")
    assert build.find_compiler() == ["ccache", "g++"]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small source, in place of the kernels."""
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    build.SOURCES.mkdir()
    (build.SOURCES / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return build.SOURCES


def test_a_failed_build_says_why_and_leaves_the_old_library(sources: Path) -> None:
    level = build.usable_levels()[0]
    before = build.build(level).read_bytes()
    (sources / "two.cpp").write_text("int two( {\n")
    with pytest.raises(RuntimeError, match=r"compiling the CPU kernels failed: [\s\S]*two\.cpp"):
        build.build(level)
    assert build.library_path(level).read_bytes() == before
    assert [file.name for file in build.BUILT.iterdir()] == [build.library_path(level).name]


def test_folders_of_killed_builds_are_removed_and_those_in_use_stay(sources: Path) -> None:
    left, used = build.BUILT / "building-left", build.BUILT / "building-used"
    for folder in (left, used):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    build.build(build.usable_levels()[0])
    assert not left.exists() and used.exists()


def test_a_compiler_that_never_ends_is_a_failed_build(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources.parent / "c++").write_text("#!/bin/sh\nexec sleep 60\n")
    (sources.parent / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(sources.parent / "c++"))
    monkeypatch.setattr(build, "DEADLINE_S", 0.1)
    with pytest.raises(RuntimeError, match="compiling the CPU kernels took more than 0.1 s"):
        build.build(build.usable_levels()[0])


def test_zig_has_a_name_for_the_cpu_of_every_level() -> None:
    options = [option for levels in build.LEVELS.values() for options, _ in levels.values() for option in options]
    assert {option for option in options if option.startswith("-march")} <= build.ZIG_NAMES.keys()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="needs the package ziglang, which compiles for ARM anywhere")
@pytest.mark.skipif(sys.platform != "linux" or build.platform.machine() != "x86_64", reason="compares ARM with x86-64")
def test_kernels_of_arm_compile_and_give_the_bits_of_avx2(tmp_path: Path) -> None:
    """Run ``every_level.cpp`` of all; without Debian's package qemu-user or qemu-user-static ARM's are only compiled."""
    zig, sources = [sys.executable, "-m", "ziglang", "c++", "-nostdlib++"], map(str, build.SOURCES.rglob("*.cpp"))
    files = [str(Path(__file__).with_name("every_level.cpp")), *sources, f"-I{build.SOURCES}", '-DTW_SOURCE_HASH=""']
    flags = [flag for flag in build._FLAGS if flag != "-shared"] + ["-O1", "-Wno-unknown-warning-option"]
    outputs = []
    for machine, level in (("x86_64", "v3"), ("aarch64", "neon"), ("aarch64", "neon-dot")):
        cpu = build.ZIG_NAMES[build.LEVELS[machine][level][0][0]]
        program = str(tmp_path / level)
        given = [*zig, "-target", f"{machine}-linux-musl", "-static", *flags, cpu, *files, "-o", program]
        subprocess.run(given, check=True, timeout=build.DEADLINE_S)
        emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
        if machine == "aarch64" and emulator is None:
            continue
        command = [program] if machine == "x86_64" else [str(emulator), program]
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert len(outputs[0].splitlines()) > 180 and len(set(outputs)) == 1


def test_a_compiler_that_does_not_exist_is_a_failed_build(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"the C\+\+ compiler no-such-compiler cannot be run: No such file"):
        build.build(build.usable_levels()[0])


def test_a_changed_source_changes_the_hash(sources: Path) -> None:
    before = build.source_hash()
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build.source_hash() != before


def test_sources_in_a_folder_are_compiled_and_hashed_even_with_the_name_of_another(sources: Path) -> None:
    (sources / "folder").mkdir()
    before, visible = build.source_hash(), 'extern "C" __attribute__((visibility("default"))) int '
    (sources / "one.cpp").write_text("int other(); " + visible + "sum() { return 1 + other(); }\n")
    alone = build.source_hash()
    (sources / "folder" / "one.cpp").write_text("int other() { return 2; }\n")
    assert len({before, alone, build.source_hash()}) == 3
    assert ctypes.CDLL(str(build.build(build.usable_levels()[0]))).sum() == 3
