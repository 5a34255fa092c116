"""Settings of this machine and user. The only module that reads the environment.

Defaults live here and nowhere else. Everything is a frozen dataclass that is built once and passed on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

DEMO_MODEL_ID = "smollm2-135m"
DEFAULT_PORT = 8012
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Paths:
    """Where things lie. All directories are made 0700 by whoever writes to them first."""

    data_dir: Path
    """Models, chats, n-gram tables, the port's key."""
    cache_dir: Path
    """Everything that may be deleted at any time: spilled KV, compiled kernels, self-test results."""

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def chats_file(self) -> Path:
        return self.data_dir / "chats.sqlite3"

    @property
    def key_file(self) -> Path:
        return self.data_dir / "control.key"

    @property
    def engine_file(self) -> Path:
        """Where a running engine that `chat` may join writes its address."""
        return self.data_dir / "engine.json"

    @property
    def kv_dir(self) -> Path:
        return self.cache_dir / "kv"

    @property
    def drafters_dir(self) -> Path:
        return self.data_dir / "drafters" / "models"

    @property
    def tuner_dir(self) -> Path:
        """What was measured of drafting on this machine."""
        return self.cache_dir / "tuner"

    @property
    def ngram_dir(self) -> Path:
        return self.data_dir / "ngram"


@dataclass(frozen=True)
class NetworkSettings:
    """How models are fetched."""

    hub_endpoint: str = "https://huggingface.co"
    hub_mirrors: tuple[str, ...] = ()
    """Addresses that are tried, in order, when the endpoint cannot deliver. They never get the token."""
    hub_token: str | None = field(default=None, repr=False)
    hub_token_place: str = "HF_TOKEN"
    """Where the token came from, or the variable to set: said to the user instead of the token."""
    hub_cache_dir: Path | None = None
    package_index: str = "https://pypi.org/simple"
    http_proxy: str | None = field(default=None, repr=False)
    https_proxy: str | None = field(default=None, repr=False)
    """Proxies may carry a password, so no representation shows them."""
    no_proxy: tuple[str, ...] = ()
    """Hosts, `.suffixes` and `host:port`s that are reached directly; `*` is all of them."""
    ca_file: Path | None = None
    """Certificates to trust instead of the shipped ones, for networks that open TLS."""
    ca_dir: Path | None = None
    offline: bool = False


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    paths: Paths
    network: NetworkSettings
    no_color: bool = False
    over_ssh: bool = False
    in_tmux: bool = False
    term: str | None = None
    color_term: str | None = None
    term_program: str | None = None


def prepare_process() -> None:
    """Before torch is imported: let worker threads spin only briefly before they sleep.

    One step of the demo model on two cores, alone and beside two busy neighbours: with the library's long spinning 45
    ms and seconds, always sleeping 69 and 133 ms, with this count 51 and 122 ms.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment (LOCALSPEC_HOME, HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HTTPS_PROXY,
    NO_PROXY, SSL_CERT_FILE, NO_COLOR, ...), with the meaning that other programs give them.

    Raises FileNotFoundError for a `~` that stands for nobody's home.
    """
    env = os.environ if environment is None else environment
    home = env.get("LOCALSPEC_HOME")
    if home:
        paths = Paths(_folder(home), _folder(home) / "cache")
    else:
        paths = Paths(
            Path(platformdirs.user_data_dir("localspec", appauthor=False)),
            Path(platformdirs.user_cache_dir("localspec", appauthor=False)),
        )
    return Settings(
        paths=paths,
        network=_network(env),
        no_color=bool(env.get("NO_COLOR")),
        over_ssh=bool(env.get("SSH_CONNECTION")),
        in_tmux=bool(env.get("TMUX")),
        term=env.get("TERM"),
        color_term=env.get("COLORTERM"),
        term_program=env.get("TERM_PROGRAM") or ("Windows Terminal" if env.get("WT_SESSION") else None),
    )


def _folder(text: str) -> Path:
    """A path in which `~` and `~name` stand for homes."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no such home; write the path out, or set HOME", text) from None


def _network(env: Mapping[str, str]) -> NetworkSettings:
    hub_home = _folder(env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface")
    token, place = _hub_token(env, hub_home)
    ca_file = env.get("SSL_CERT_FILE") or env.get("REQUESTS_CA_BUNDLE")
    return NetworkSettings(
        hub_endpoint=(env.get("HF_ENDPOINT") or NetworkSettings.hub_endpoint).rstrip("/"),
        hub_mirrors=_words(env.get("LOCALSPEC_HUB_MIRRORS", "")),
        hub_token=token,
        hub_token_place=place,
        hub_cache_dir=_folder(env.get("HF_HUB_CACHE") or str(hub_home / "hub")),
        package_index=(env.get("PIP_INDEX_URL") or NetworkSettings.package_index).rstrip("/"),
        http_proxy=_either_case(env, "http_proxy") or _either_case(env, "all_proxy"),
        https_proxy=_either_case(env, "https_proxy") or _either_case(env, "all_proxy"),
        no_proxy=_words(_either_case(env, "no_proxy") or ""),
        ca_file=Path(ca_file) if ca_file else None,
        ca_dir=Path(env["SSL_CERT_DIR"]) if env.get("SSL_CERT_DIR") else None,
        offline=_is_on(env, "HF_HUB_OFFLINE") or _is_on(env, "LOCALSPEC_OFFLINE"),
    )


def _either_case(env: Mapping[str, str], name: str) -> str | None:
    """Programs disagree on the case of proxy variables; the lower one is the older and wins."""
    return env.get(name) or env.get(name.upper()) or None


def _is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip().rstrip("/")))


def _hub_token(env: Mapping[str, str], hub_home: Path) -> tuple[str | None, str]:
    """The hub's token and the place it came from: a variable, or the file that the hub's own log-in writes.

    Anything but one printable word is no token: it would break the header that it is sent in.
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := _as_token(env.get(name, "")):
            return token, name
    if not _is_on(env, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        path = _folder(env.get("HF_TOKEN_PATH") or str(hub_home / "token"))
        try:
            with path.open("rb") as file:
                token = _as_token(file.read(MAX_TOKEN_BYTES).decode("ascii", "replace"))
        except OSError:
            token = None
        if token is not None:
            return token, str(path)
    return None, "HF_TOKEN"


def _as_token(text: str) -> str | None:
    text = text.strip()
    return text if text.isascii() and text.isprintable() and " " not in text and text else None
