"""What can run here: numba for CPU tensors; CUDA tensors go through torch and Triton.

Nothing falls back in silence: a CPU host without numba is an error that names the remedy, because the same model on
plain torch operations would answer correctly and several times slower, which nobody would notice.
"""

import platform


def require_numba() -> None:
    """Raise unless numba can be imported and compile for this CPU; the CPU kernels cannot do without it.

    Raises:
        RuntimeError: numba is missing, or is installed and fails to import (a NumPy it does not know, say), or the CPU
            is an x86 older than 2013, for which LLVM would call conversion routines that are not there and abort.
    """
    try:
        import numba  # noqa: F401
        from llvmlite.binding import get_host_cpu_features
    except ImportError as error:
        raise RuntimeError(
            f"the CPU kernels need numba, which cannot be imported here ({error}); "
            "install it with: python -m pip install 'numba>=0.61'"
        ) from error
    features = get_host_cpu_features() if platform.machine() in ("x86_64", "AMD64") else {"fma": True, "f16c": True}
    missing = [name for name in ("fma", "f16c") if not features.get(name)]
    if missing:
        raise RuntimeError(f"this CPU lacks {' and '.join(missing)}; the CPU kernels need an x86 with both, or ARM")
