"""Settings of the port, built once by the composition root."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.config import DEFAULT_PORT


@dataclass(frozen=True)
class ServerSettings:
    """How the port behaves. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 listens on ::1 too. Others need `api_key`."""
    port: int = DEFAULT_PORT
    """0 takes a free port."""
    api_key: str | None = None
    """Asked of every request but /health, as Bearer or x-api-key."""
    control_key: str | None = None
    """Asked of /localspec/v1 in x-localspec-key; None switches those calls off."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside the loopback ones that a Host header may give while there is no `api_key`."""
    cors_origins: tuple[str, ...] = ()
    """Origins beside the local ones whose pages may call; `*` allows all."""
    max_body_bytes: int = 16 << 20
    max_requests: int = 128
    """Running and waiting requests together; one more gets 429."""
    max_choices: int = 8
    """Upper bound of `n`."""
    strict_model: bool = False
    """Refuse names of models that are not loaded instead of answering with the loaded one."""
    emit_reasoning: bool = False
    """Give thoughts under `reasoning` too, not only `reasoning_content`."""
    keep_alive_s: float = 10.0
    """Silence after which a stream gets a comment."""
    send_timeout_s: float = 60.0
    """A client that takes nothing for so long is dropped."""
    first_event_s: float = 0.5
    """How long a stream waits for an early refusal before its headers go out."""
    stop_when_unused: bool = False
    """Shut down when the last holder of a metrics stream has left (an engine that `chat` started)."""
    unused_grace_s: float = 3.0
    unclaimed_s: float = 120.0
    """With `stop_when_unused`: how long to wait for the first holder, which may have died before it came."""
