"""Settings of this machine and user. The only module that reads the environment.

Defaults live here and nowhere else. Everything is a frozen dataclass that is built once and passed on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

DEMO_MODEL_ID = "smollm2-135m"
DEFAULT_PORT = 8012


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
    hub_token: str | None = None
    hub_cache_dir: Path | None = None
    package_index: str = "https://pypi.org/simple"
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


def prepare_process() -> None:
    """Before torch is imported: let worker threads spin only briefly before they sleep.

    One step of the demo model on two cores, alone and beside two busy neighbours: with the library's long spinning 45
    ms and seconds, always sleeping 69 and 133 ms, with this count 51 and 122 ms.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment (LOCALSPEC_HOME, HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, NO_COLOR, ...)."""
    env = os.environ if environment is None else environment
    home = env.get("LOCALSPEC_HOME")
    if home:
        paths = Paths(Path(home).expanduser(), Path(home).expanduser() / "cache")
    else:
        paths = Paths(
            Path(platformdirs.user_data_dir("localspec", appauthor=False)),
            Path(platformdirs.user_cache_dir("localspec", appauthor=False)),
        )
    hub_cache = env.get("HF_HUB_CACHE") or (f"{env['HF_HOME']}/hub" if env.get("HF_HOME") else None)
    network = NetworkSettings(
        hub_endpoint=env.get("HF_ENDPOINT", NetworkSettings.hub_endpoint).rstrip("/"),
        hub_token=env.get("HF_TOKEN") or None,
        hub_cache_dir=Path(hub_cache).expanduser() if hub_cache else Path.home() / ".cache/huggingface/hub",
        package_index=env.get("PIP_INDEX_URL", NetworkSettings.package_index).rstrip("/"),
        offline=env.get("HF_HUB_OFFLINE", "") not in ("", "0") or env.get("LOCALSPEC_OFFLINE", "") not in ("", "0"),
    )
    return Settings(
        paths=paths,
        network=network,
        no_color=bool(env.get("NO_COLOR")),
        over_ssh=bool(env.get("SSH_CONNECTION")),
        in_tmux=bool(env.get("TMUX")),
        term=env.get("TERM"),
        color_term=env.get("COLORTERM"),
    )
