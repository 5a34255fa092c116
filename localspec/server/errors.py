"""What goes wrong with a request, and how each protocol says it.

Knows statuses and envelopes; knows nothing of routes.
"""

from __future__ import annotations

from typing import Any

from localspec.api.types import EngineError

_STATUS_OF_CODE = {
    "context_length_exceeded": 400,
    "bad_request": 400,
    "unsupported": 400,
    "model_not_found": 404,
    "overloaded": 429,
    "not_ready": 503,
    "internal": 500,
}
_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that is answered with an error. `param` names the field, `code` is a stable word."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """The class of error that OpenAI's and Anthropic's clients tell apart."""
        return _TYPE_OF_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def openai(self) -> dict[str, Any]:
        """Envelope with all four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Envelope of /v1/messages."""
        names = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
        return {"type": "error", "error": {"type": names.get(self.type, self.type), "message": self.message}}

    def ollama(self) -> dict[str, Any]:
        """Envelope of /api."""
        return {"error": self.message}

    def for_path(self, path: str) -> dict[str, Any]:
        """The envelope that clients of this path read."""
        if path.startswith("/api/") and not path.startswith("/api/v0"):
            return self.ollama()
        return self.anthropic() if "/messages" in path else self.openai()


def bad(message: str, param: str | None = None, code: str = "bad_request") -> ApiError:
    """A request that its sender must change."""
    return ApiError(400, message, code=code, param=param)


def from_engine(error: EngineError) -> ApiError:
    """The engine's refusal as an answer of the port."""
    status = _STATUS_OF_CODE.get(error.code, 500)
    param = error.param or ("messages" if error.code == "context_length_exceeded" else None)
    retry_after_s = {429: 1, 503: 2}.get(status)
    return ApiError(status, error.message, code=error.code, param=param, retry_after_s=retry_after_s)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure as an answer; what is not ours says nothing of its inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return from_engine(error)
    return ApiError(500, "The server failed on this request; its log has the details.", code="internal")
