"""A file opened for random reads: past the page cache where its file system allows that, buffered elsewhere.

Knows one descriptor and its limits; knows nothing of threads or of what is read.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from localspec.storage.buffers import ALIGNMENT_BYTES, aligned_memory


class OpenFile:
    """A file prepared for reading; its descriptor closes with the last request that needs it."""

    def __init__(
        self, path: Path | str, *, random_access: bool = False, no_follow: bool = False, direct: bool | None = None
    ) -> None:
        """Open the file and find out whether it can be read past the page cache, unless `direct` is what a file beside
        it said: finding out is a read, which waits behind all that are under way.

        Raises:
            OSError: the file cannot be opened, or is a link and `no_follow` was asked.
        """
        self.path = Path(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if no_follow else 0)
        self._fd, self.direct = _open_direct_or_buffered(self.path, flags, direct)
        self.closed = False
        self.size_bytes = os.fstat(self._fd).st_size
        """When it was opened."""
        if random_access and not self.direct:
            # Read-ahead would fetch 128 KiB around each 4 KiB page.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def fileno(self) -> int:
        """The descriptor, opened with O_DIRECT when `direct` says so."""
        return self._fd

    def span(self, offset_bytes: int, length_bytes: int) -> tuple[int, int]:
        """Bytes before the wanted ones, and bytes to read, so that both ends lie where this file can be read."""
        if not self.direct:
            return 0, length_bytes
        skew = offset_bytes % ALIGNMENT_BYTES
        return skew, -(-(skew + length_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def close(self) -> None:
        """Refuse further requests; the ones under way are served."""
        self.closed = True

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _open_direct_or_buffered(path: Path, flags: int, direct: bool | None) -> tuple[int, bool]:
    if direct is not None:
        return os.open(path, flags | (os.O_DIRECT if direct else 0)), direct
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    try:
        # Some file systems (overlays, network) accept the flag and refuse the read.
        os.preadv(fd, [aligned_memory(ALIGNMENT_BYTES).data], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    return fd, True
