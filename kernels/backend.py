"""What can run here: numba for CPU tensors, Triton for CUDA tensors, Triton's interpreter for tests.

Nothing falls back in silence: a CPU host without numba is an error that names the remedy, because the same model on
plain torch operations would answer correctly and several times slower, which nobody would notice.
"""

import importlib.util
import os

import torch


def require_numba() -> None:
    """Raise unless numba can be imported; the CPU kernels cannot do without it.

    Raises:
        RuntimeError: numba is missing, or is installed and fails to import (a NumPy it does not know, say).
    """
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"the CPU kernels need numba, which cannot be imported here ({error}); "
            "install it with: python -m pip install 'numba>=0.61'"
        ) from error


def triton_usable(device: torch.device) -> bool:
    """Whether Triton kernels can run on tensors of this device."""
    if device.type == "cuda":
        return _triton_installed()
    return triton_interpreted()


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its Python interpreter, on CPU tensors: for tests only, a thousand times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _triton_installed()


def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
