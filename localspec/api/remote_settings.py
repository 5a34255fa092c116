"""Where a port is, how patient to be with it, and what to say when it does not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx

from localspec.api.types import EngineError


@dataclass(frozen=True)
class RemoteSettings:
    """Where the port is and how patient to be. `url` with or without /v1; times in seconds.

    `find_url` is for an engine that somebody starts anew when it goes: it is asked in a thread before each attempt to
    connect, and may raise EngineError when there will be none. Such an engine is waited for, up to `connect_timeout_s`,
    and `unreachable` is what to say then.
    """

    url: str
    api_key: str | None = None
    control_key: str | None = None
    model: str | None = None
    client_name: str = "localspec"
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 600.0
    poll_s: float = 0.5
    find_url: Callable[[], str] | None = None
    unreachable: str = ""
    group_s: float = 0.0
    """Have our own port send the events of so long a time in one piece, which costs a client less."""

    @property
    def root(self) -> str:
        """Address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    def no_answer(self) -> EngineError:
        """Nothing can be reached there."""
        text = f"Nothing answers at {self.root}; start it there (`localspec serve`) or mend --url."
        return EngineError("not_ready", self.unreachable or text)

    def broken(self, error: httpx.HTTPError, begun: bool) -> EngineError:
        """A request was on its way when the connection ended; `begun` says whether its answer had."""
        who = "The engine" if self.find_url is not None else f"The server at {self.root}"
        if isinstance(error, httpx.TimeoutException):
            return EngineError("internal", f"{who} sent nothing for {self.read_timeout_s:.0f} s.")
        rest = "in mid-answer; the text so far is kept" if begun else "before the answer began; send it again"
        return EngineError("internal", f"{who} stopped {rest}.")
