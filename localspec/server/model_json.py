"""JSON that a model wrote: read so that it can be written again, and as the object that arguments must be.

Python reads more than JSON has (NaN, numbers beyond every float, halves of characters) and then cannot write it.
Knows nothing of the forms of calls.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any


def read_json(text: str) -> Any:
    """The value. Raises ValueError for what is no JSON, is nested too deeply, or cannot be sent as JSON in UTF-8."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    return value


def argument_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object; what cannot be read, such as an unfinished call, is kept as text."""
    value: Any = arguments
    with contextlib.suppress(ValueError):
        value = read_json(arguments or "{}")
    return value if isinstance(value, dict) else {"input": value}
