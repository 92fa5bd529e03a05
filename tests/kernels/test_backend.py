import sys

import pytest

from tightwire.kernels import backend


def test_missing_numba_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.require_numba()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(RuntimeError, match="pip install 'numba"):
        backend.require_numba()


def test_a_cpu_too_old_is_an_error_that_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"fma": True, "f16c": False})
    with pytest.raises(RuntimeError, match="lacks f16c; the CPU kernels need"):
        backend.require_numba()
