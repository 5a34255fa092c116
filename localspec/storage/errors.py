"""What can be wrong with a file: the errors of this package.

Knows nothing of any format; the message names the file, says what is wrong with it, and what would help.
"""

from __future__ import annotations


class DamagedFile(ValueError):
    """A file does not hold what its format promises: torn, truncated, flipped, or made to harm."""


class WrongOwner(ValueError):
    """A file is whole but belongs to another model, tokenizer or format version, so nothing in it may be used."""
