"""Creates files and folders atomically, and names the cache folder. They are filled under a temporary name and renamed at the end.

A reader, or a crash, never sees a part of them. For a folder the process locks ``NAME.partial-PID`` until it ends, so the next one removes what a killed one left.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_PARTIAL = ".partial-"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tightwire``, or ``~/.cache/tightwire``: where every floor keeps what it fetched or measured."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tightwire"


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` next to ``path``, then rename it to ``path``. If that fails, no temporary file remains."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # mkstemp's files are private, and a server may run as another user
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise


def is_partial(folder: Path) -> bool:
    """Return True if the folder's name is a temporary one."""
    return re.search(re.escape(_PARTIAL) + r"\d+(-old)?$", folder.name) is not None


@contextlib.contextmanager
def whole_folder(
    out: Path, *, check_replaced: Callable[[Path], object], say: Callable[[str], object] = lambda line: None
) -> Iterator[Path]:
    """Yield an empty folder to fill. The end of the block syncs and renames it to ``out``; an exception removes it.

    ``check_replaced``: called with ``out`` if it exists and is not empty; raises if it must not be replaced. ``say``:
    called with a line about each leftover that was removed. Raises ValueError: ``out`` cannot be created here, or
    another process is creating it.
    """
    out = Path(os.path.realpath(out))
    check_place(out, check_replaced)
    _remove_leftovers(out, say)
    partial, lock = _make_locked(out.with_name(f"{out.name}{_PARTIAL}{os.getpid()}"))
    try:
        yield partial
        for path in [*partial.iterdir(), partial]:
            sync(path)
        check_place(out, check_replaced)  # it may have changed in the meantime
        _put(partial, out)
        sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Inside ``with``, no other process is inside with the same folder. It locks ``folder/.lock``, which stays, until the process ends.

    Raises ValueError: another process is inside; the message names it. OSError: the file cannot be written or locked.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            name = file.read() or "another process"
            raise ValueError(f"{folder} is used by {name}; wait until it ends, or give another folder") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            sys.stderr.write(f"{folder}: its file system has no locks, so see that no other process uses the folder\n")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check_place(out: Path, check_replaced: Callable[[Path], object]) -> None:
    """Raise ValueError if ``whole_folder`` cannot create ``out`` here."""
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist; create it first")
    if out.is_dir():
        if os.path.ismount(out):
            raise ValueError(f"{out}: is a mount point; give a folder inside it, such as {out / 'model'}")
        if any(out.iterdir()):
            check_replaced(out)
    elif os.path.lexists(out):
        raise ValueError(f"{out}: exists and is not a folder; give another name")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{out.parent}: is not writable; choose another folder")


def _remove_leftovers(out: Path, say: Callable[[str], object]) -> None:
    for path in out.parent.glob(f"{glob.escape(out.name)}{_PARTIAL}*"):
        if not is_partial(path):
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # already removed, or not accessible
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{out}: is being written by another process, in {path.name}; wait for it, or give another name"
            ) from None
        else:
            shutil.rmtree(path, ignore_errors=True)
            say(f"removed {path}, which an earlier run left unfinished")
        finally:
            os.close(lock)


def _make_locked(partial: Path) -> tuple[Path, int]:
    """Create and lock the folder. Try again if another process removes it as a leftover before it is locked."""
    while True:
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(partial), os.fstat(lock)):
                return partial, lock
        os.close(lock)


def _put(partial: Path, out: Path) -> None:
    """Rename ``partial`` to ``out``. Afterwards an old ``out`` is at ``partial`` or removed."""
    try:
        partial.rename(out)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE) == 0:
        return
    if (code := ctypes.get_errno()) not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), str(out))
    old = partial.with_name(partial.name + "-old")  # the file system cannot exchange names
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
