"""Build hook: compiles the CPU kernels while the package is installed.

An editable install builds the best level that this CPU runs; a wheel holds every level of its architecture. The compiler is
the system's, or that of the ``ziglang`` package, which is a build requirement only where there is no other.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # pyright: ignore[reportMissingImports] - only builds have it


def _load_build() -> Any:
    """native_build.py without the package around it, whose dependencies a build environment lacks."""
    path = Path(__file__).parent / "src" / "tightwire" / "native_build.py"
    spec = importlib.util.spec_from_file_location("tightwire_kernel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(BuildHookInterface):
    """Compiles kernels/cpu/native for an editable install or a wheel."""

    def dependencies(self) -> list[str]:
        build = _load_build()
        if self.target_name != "wheel" or not build.machine_levels():
            return []
        try:
            build.find_compiler()
        except build.NoCompilerError:
            return ["ziglang"]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build = _load_build()
        levels = build.usable_levels()[-1:] if version == "editable" else list(build.machine_levels())
        for level in levels:
            try:
                library = build.build(level)
                # Named one by one: a folder that was built in before may hold others, which no sdist or wheel should have.
                build_data["artifacts"].append(library.relative_to(Path(__file__).resolve().parent).as_posix())
            except RuntimeError as error:
                if version != "editable":
                    raise
                # Tightwire works without: it says so at its start, and what to install.
                sys.stderr.write(f"Tightwire's CPU kernels were not built: {error}\n")
        if version != "editable" and levels:
            build_data["pure_python"] = False
            build_data["infer_tag"] = False
            build_data["tag"] = f"py3-none-{build.platform_tag()}"
