"""Makes a pytest run use the emulated CUDA device: ``python -m pytest -p helpers.emulated.pytest_plugin tests/gpu``."""

from helpers.emulated import cuda

cuda.install()
