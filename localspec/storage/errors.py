"""The errors of this package: what can be wrong with a file, and why a read was not made.

Knows nothing of any format; the message names the file, says what is wrong with it, and what would help.
"""

from __future__ import annotations


class DamagedFile(ValueError):
    """A file does not hold what its format promises: torn, truncated, flipped, or made to harm."""


class WrongOwner(ValueError):
    """A file is whole but belongs to another model, tokenizer or format version, so nothing in it may be used."""


class TableFull(ValueError):
    """A table cannot name more sources; what it holds stays."""


class QueueFull(RuntimeError):
    """More requests wait than the reader was built for; nothing of the batch was posted."""


class ReaderClosed(RuntimeError):
    """The reader was closed before this request was read."""


class ReadCancelled(RuntimeError):
    """The request was cancelled before a worker began it."""
