"""What the modules of the hub hand to each other and to the commands: settings, progress, errors. Stdlib only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

EXIT_FAILED = 1
EXIT_MACHINE_CANNOT = 3


class HubError(Exception):
    """One sentence for the user: what is wrong and what would work. `exit_code` is the command's."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class HubSettings:
    """How to reach model sources. Filled by the configuration; nothing here is read from the environment."""

    endpoint: str = "https://huggingface.co"
    """Address of the hub (HF_ENDPOINT)."""
    mirrors: tuple[str, ...] = ()
    """Other hub addresses, tried in order after the endpoint."""
    token: str | None = field(default=None, repr=False)
    """Access token for gated models; sent to the endpoint's own host only, never to mirrors or redirect targets."""
    token_variable: str = "HF_TOKEN"
    """Where the token is, or the variable to set: shown to the user instead of the token."""
    index_url: str = "https://pypi.org/simple"
    """Simple index for files that travel in wheels."""
    hub_cache_dir: str | None = None
    """The user's hub cache (HF_HUB_CACHE); a complete file there is used without copying."""
    http_proxy: str | None = field(default=None, repr=False)
    https_proxy: str | None = field(default=None, repr=False)
    no_proxy: tuple[str, ...] = ()
    """Hosts, `.suffixes` and `host:port`s that are reached without a proxy; `*` is all of them."""
    ca_file: str | None = None
    ca_dir: str | None = None
    """Certificates to trust instead of the shipped ones."""
    allow_pip: bool = True
    """Whether `pip download` may be tried when the index cannot be reached directly."""
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 20.0
    """A transfer that moves no byte for this long is dropped and tried again."""
    least_bytes_per_s: int = 256
    """A transfer that moves less than this over `stall_timeout_s` is dropped too: bytes that trickle hold it up as
    none would."""
    reply_timeout_s: float = 60.0
    """A listing or another small reply that is not whole by then is given up."""
    n_connections: int = 4
    max_attempts: int = 6
    """Attempts for one range without any progress; progress resets the count."""
    backoff_s: float = 0.5
    """First pause after a failed attempt; doubles up to 30 s, or what Retry-After says."""
    range_bytes: int = 32 << 20
    """Bytes asked for in one request; what a broken request brought is kept."""


@dataclass(frozen=True)
class PullProgress:
    """A moment of a pull. `done_bytes` never shrinks within a source; `total_bytes` is None until sizes are known."""

    stage: str
    """One of: locate, download, verify, convert, publish, done, note."""
    message: str
    """A line for the user; says which source is used or why one was left."""
    file_name: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None
    rate_bytes_per_s: float = 0.0
    eta_s: float | None = None


ProgressCallback = Callable[[PullProgress], None]


def ignore_progress(progress: PullProgress) -> None:
    """The callback of a caller that does not look."""


@dataclass(frozen=True)
class PullResult:
    """What a pull did, or with dry_run what it would do."""

    model_id: str
    directory: str
    source: str
    files: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    """File name -> size in bytes (None: not stated by the source)."""
    notes: tuple[str, ...] = ()
    dry_run: bool = False
    already_installed: bool = False
    base_model: str = ""
    """The repository that the pulled one says it was made from, where the catalogue does not know."""
