"""A file or folder appears complete or not at all; leftovers of killed processes are removed, those of live ones are not."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tightwire import whole_folder as module
from tightwire.whole_folder import cache_folder, is_partial, only_user, whole_folder, write_atomic


def refuse(folder: Path) -> None:
    raise ValueError("not to be replaced")


def fill(folder: Path, text: str = "new") -> None:
    (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole_folder(out, check_replaced=refuse) as folder:
        fill(folder)
        assert folder.parent == tmp_path and is_partial(folder)
        assert not out.exists()
    assert names(tmp_path) == ["out"]
    assert (out / "file").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), whole_folder(tmp_path / "out", check_replaced=refuse) as folder:
        fill(folder)
        raise error
    assert names(tmp_path) == []


def test_an_empty_folder_is_used_and_a_full_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with whole_folder(out, check_replaced=refuse) as folder:
        fill(folder)
    with pytest.raises(ValueError, match="not to be replaced"), whole_folder(out, check_replaced=refuse):
        pytest.fail("refused before anything is made")
    assert names(tmp_path) == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="not to be replaced"), whole_folder(out, check_replaced=refuse) as folder:
        fill(folder)
        out.mkdir()
        fill(out, "of another")
    assert names(tmp_path) == ["out"]
    assert (out / "file").read_text() == "of another"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(module, "_RENAME_EXCHANGE", 1 << 30)  # a flag that no file system knows: EINVAL
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "old")
    with whole_folder(out, check_replaced=lambda folder: None) as folder:
        fill(folder)
        assert (out / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]
    assert (out / "file").read_text() == "new"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "out")
    with whole_folder(tmp_path / "link", check_replaced=refuse) as folder:
        fill(folder)
    assert (tmp_path / "elsewhere" / "out" / "file").is_file()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tightwire.whole_folder import whole_folder\n"
        "with whole_folder(Path(sys.argv[1]), check_replaced=print): os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "o[u]t")], env=environment, timeout=240, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert is_partial(left)
    said: list[str] = []
    with whole_folder(tmp_path / "o[u]t", check_replaced=refuse, say=said.append) as folder:
        fill(folder)
    assert names(tmp_path) == ["o[u]t"]
    assert len(said) == 1 and left.name in said[0]


def test_two_processes_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole_folder(out, check_replaced=refuse) as folder:
        fill(folder)
        with pytest.raises(ValueError, match="is being written by another process"):
            whole_folder(out, check_replaced=refuse).__enter__()
        with whole_folder(tmp_path / "other", check_replaced=refuse) as other:
            fill(other)
    assert names(tmp_path) == ["other", "out"]


def test_files_named_alike_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial-mine").mkdir()
    (tmp_path / "out.partial-7").write_text("a file")
    with whole_folder(tmp_path / "out", check_replaced=refuse) as folder:
        fill(folder)
    assert names(tmp_path) == ["out", "out.partial-7", "out.partial-mine"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing/out", "the folder .*missing does not exist; create it first"),
        ("file", "exists and is not a folder"),
        ("/", "is a mount point"),
    ],
)
def test_places_that_are_refused(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        whole_folder(tmp_path / place, check_replaced=refuse).__enter__()
    assert names(tmp_path) == ["file"]


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="is not writable; choose another folder"):
        whole_folder(tmp_path / "out", check_replaced=refuse).__enter__()


def test_a_failing_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    fill(out, "old")

    def failing(path: Path, target: Path) -> Path:
        if target == out and is_partial(path) and not path.name.endswith("-old") and not out.exists():
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(module, "_RENAME_EXCHANGE", 1 << 30)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"), whole_folder(out, check_replaced=lambda folder: None) as folder:
        fill(folder)
    assert names(tmp_path) == ["out"]
    assert (out / "file").read_text() == "old"


def test_a_folder_has_one_user_until_it_ends(tmp_path: Path) -> None:
    code = "import os, sys, pathlib; from tightwire.whole_folder import only_user; only_user(pathlib.Path(sys.argv[1])).__enter__(); os._exit(0)"
    taking = [sys.executable, "-c", code, str(tmp_path)]
    with (
        only_user(tmp_path),
        pytest.raises(ValueError, match=rf"is used by process {os.getpid()} on .*; wait until it ends"),
        only_user(tmp_path),
    ):
        pass
    subprocess.run(taking, check=True)  # a process that ends without a clean-up
    with only_user(tmp_path):
        assert subprocess.run(taking, check=False, capture_output=True).returncode == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_used_with_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_lock(file: object, how: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(module.fcntl, "flock", refuse_lock)
    with pytest.raises(OSError, match="refused") if number == errno.EIO else nullcontext(), only_user(tmp_path):
        pass
    assert ("its file system has no locks" in capsys.readouterr().err) == (number == errno.ENOLCK)


def test_a_file_is_replaced_as_a_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()

    with pytest.raises(OSError):
        write_atomic(path, b"a file cannot replace a folder")

    assert list(tmp_path.iterdir()) == [path]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "tightwire"
