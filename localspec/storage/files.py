"""How a file comes into being here: written under a temporary name, then renamed, so that no reader sees half of it.

Knows directories, modes and locks; knows nothing of what the bytes mean. A temporary file is held under flock by its
writer, so the sweep can tell the leftovers of a killed process from the work of a living one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[np.generic]
WriteFunction = Callable[[int, memoryview], int]
"""Writes some of the bytes to a file descriptor and returns how many; os.write, or a stand-in that fails in tests."""

TEMPORARY_PREFIX = ".tmp-"


def as_bytes(buffer: Buffer) -> memoryview:
    """View a C-contiguous buffer as flat bytes, without a copy.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("A buffer to be written must be C-contiguous; pass numpy.ascontiguousarray(buffer).")
        return memoryview(buffer.reshape(-1).view(np.uint8).data)
    view = memoryview(buffer)
    # memoryview.cast refuses shapes that hold a zero.
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_all(fd: int, data: memoryview, write_function: WriteFunction) -> None:
    """Write every byte, in as many calls as the kernel wants; OSError (disk full among them) passes through."""
    # One call moves at most 2 GiB on Linux, so a short count is normal and not an error.
    while data.nbytes:
        written_bytes = write_function(fd, data)
        if written_bytes <= 0:
            raise OSError(errno.EIO, "The file system accepted no bytes.")
        data = data[written_bytes:]


def make_private_directory(path: Path) -> None:
    """Create a directory of mode 0700 (and its parents); refuse one that is a link or belongs to another user.

    Raises:
        PermissionError: the path exists but is a symbolic link, not a directory, or owned by someone else.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} must be a directory of this user and not a link; choose another cache directory."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)


def make_private_file(path: Path) -> None:
    """Create an empty file of mode 0600 where there is none, for SQLite.

    One that exists is not opened: closing it would drop the locks that this process's connections hold on it, and the
    next process to leave would take the journal away under them.

    Raises:
        OSError: the path is a link, or the file cannot be created.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def sync_directory(path: Path) -> None:
    """Make a rename in this directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    """Flush the whole file system that holds the directory: one call for many small files (Linux syncfs)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)


class AtomicFile:
    """A file that appears under its name whole or not at all; use as a context manager.

    Leaving the block normally publishes it, leaving it by an exception removes every trace.
    """

    def __init__(self, path: Path, *, durable: bool = True, write_function: WriteFunction = os.write) -> None:
        """Open the temporary file beside `path` (mode 0600); `durable` syncs the file and its directory on publish."""
        self.path = path
        self._durable = durable
        self._write_function = write_function
        self._published = False
        self.temporary_path, self.fd = _open_locked_temporary(path.parent)

    def write(self, data: Buffer) -> None:
        """Append bytes; raises OSError when the disk is full."""
        write_all(self.fd, as_bytes(data), self._write_function)

    def rewrite(self, offset_bytes: int, data: Buffer) -> None:
        """Write bytes at an offset, for a header whose fields are known last; the append position stays at the end."""
        os.lseek(self.fd, offset_bytes, os.SEEK_SET)
        self.write(data)
        os.lseek(self.fd, 0, os.SEEK_END)

    def publish(self) -> None:
        """Give the file its name; from here on it is visible."""
        if self._durable:
            os.fsync(self.fd)
        self.temporary_path.rename(self.path)
        self._published = True
        os.close(self.fd)
        if self._durable:
            sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file; does nothing after publish."""
        if self._published:
            return
        self._published = True
        self.temporary_path.unlink(missing_ok=True)
        os.close(self.fd)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()


def _open_locked_temporary(directory: Path) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        except BlockingIOError:
            # A sweep locked it in the moment between creation and our lock and is about to remove it.
            pass
        os.close(fd)


def sweep_temporary_files(directory: Path) -> int:
    """Remove the temporary files that no living writer holds; returns how many went."""
    removed = 0
    for path in directory.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            # ELOOP is a link planted under our prefix: it goes, what it points to is not touched.
            if error.errno == errno.ELOOP:
                path.unlink(missing_ok=True)
                removed += 1
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
    return removed


@contextlib.contextmanager
def exclusive_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file against other writers, across processes; a killed holder frees it.

    Raises:
        BlockingIOError: another process holds it and `wait` is False.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
