"""Reading JSON bodies that may be anything: too large, torn, deep, not UTF-8, with half characters."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from localspec.server.context import port_of
from localspec.server.errors import bad
from localspec.server.fields import Fields
from localspec.server.security import too_large
from localspec.server.settings import ServerSettings
from localspec.server.sse import ClientLeft
from localspec.server.trim import LARGE_BODY_BYTES


async def read_fields(request: Request, settings: ServerSettings) -> Fields:
    """The JSON object of a request. Raises ApiError 400 or 413, ClientLeft if the body never came whole."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > settings.max_body_bytes:
                raise too_large(settings)
    except ClientDisconnect as gone:
        raise ClientLeft from gone
    finally:
        if len(body) > LARGE_BODY_BYTES:
            port_of(request).heap.later()
    text = text_of(body)
    # A large body must not stay beside its text and its values: three copies of it at once.
    body.clear()
    return Fields(parse(text))


def text_of(body: bytes | bytearray) -> str:
    """Text of a body, without the mark that some systems put first. Raises ApiError 400."""
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise bad("The body is not UTF-8 text.", code="invalid_json") from None


def parse(text: str) -> Any:
    """JSON value of a body. Raises ApiError 400."""
    if not text.strip(" \t\r\n\f\v"):
        return {}
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise bad("The body is nested too deeply.", code="invalid_json") from None
    except json.JSONDecodeError as reason:
        raise bad(f"The body is not JSON: {str(reason)[:200]}.", code="invalid_json") from None
    except ValueError:
        raise bad("The body holds a whole number of thousands of digits.", code="invalid_json") from None
    if "\\u" in text:
        _refuse_half_characters(data)
    return data


def _refuse_half_characters(data: Any) -> None:
    """A lone surrogate has no UTF-8 form: tokenizers and answers would fail on it later."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise bad("The body holds half of a character (a lone surrogate).", code="invalid_json") from None


def _refuse_constant(name: str) -> NoReturn:
    raise bad(f"The body is not JSON: {name} is not a JSON value.", code="invalid_json")


def _finite(digits: str) -> float:
    """Answers repeat some fields, and JSON cannot write an infinite number."""
    value = float(digits)
    if math.isinf(value):
        raise bad(f"The body holds the number {digits[:40]}, which is too large.", code="invalid_json")
    return value
