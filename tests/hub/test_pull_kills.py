"""A pull that dies at any of its file operations: never half a model, and the next pull finishes it.

The process ends itself at the n-th operation, as kill -9 would: nothing is flushed, no cleanup runs. Every fourth
operation is tried here, all of them and random moments by scripts/kill_pulls.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_fake_server import FakeHub, running, sha256
from hub_gguf_samples import SampleModel, write_model

from localspec.hub.catalogue import HubSource, ModelEntry, PinnedFile
from localspec.hub.local import list_installed, prune, verify
from localspec.hub.pull import pull
from localspec.hub.records import HubSettings

pytestmark = pytest.mark.slow

SOURCE = """
import os, sys, traceback
from pathlib import Path
from localspec.hub.catalogue import HubSource, ModelEntry, PinnedFile
from localspec.hub.pull import pull
from localspec.hub.records import HubSettings

url, size, digest = sys.argv[1:]
count = [0]

def deadly(operation):
    def run(*args, **kwargs):
        count[0] -= 1
        if count[0] == 0:
            os._exit(137)
        return operation(*args, **kwargs)
    return run

for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "pwrite"):
    setattr(os, name, deadly(getattr(os, name)))
entry = ModelEntry(id="tiny", title="Tiny", architecture="llama", format="gguf", licence="x",
                   sources=(HubSource("acme/tiny", files=(PinnedFile("tiny.gguf", int(size), digest),)),))
for line in sys.stdin:
    last, data = line.rstrip().split(" ", 1)
    child = os.fork()
    if child == 0:
        count[0] = int(last)
        try:
            pull(entry, Path(data), HubSettings(endpoint=url, range_bytes=60_000, n_connections=1), force=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Puller:
    """Pulls in a process each. They are forks of one that has imported everything and done nothing yet."""

    def __init__(self, hub: FakeHub, gguf: bytes) -> None:
        command = [sys.executable, "-c", SOURCE, hub.hub_url, str(len(gguf)), sha256(gguf)]
        root = Path(__file__).parents[2]
        self._parent = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate(timeout=60)

    def run_until(self, data_dir: Path, last_operation: int) -> int:
        """Exit code of a pull that dies at its last_operation-th operation: 137, or 0 where it has fewer."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(f"{last_operation} {data_dir}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


def test_every_moment_of_a_pull(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", SampleModel())
    gguf = (tmp_path / "tiny.gguf").read_bytes()
    source = HubSource("acme/tiny", files=(PinnedFile("tiny.gguf", len(gguf), sha256(gguf)),))
    entry = ModelEntry("tiny", "Tiny", "llama", "gguf", "x", (source,))
    with running(FakeHub(files={"tiny.gguf": gguf}, lfs={"tiny.gguf"})) as hub, Puller(hub, gguf) as puller:
        settings = HubSettings(endpoint=hub.hub_url)
        n_killed, n_installed = 0, 0
        for last_operation in range(1, 200, 4):
            fresh = tmp_path / f"fresh{last_operation}"
            code = puller.run_until(fresh, last_operation)
            if code == 0:
                break
            assert code == 137
            n_killed += 1
            models = list_installed(fresh)
            n_installed += len(models)
            assert [m.problem for m in models] in ([], [None])
            assert not models or verify(fresh, "tiny") == ()
            pull(entry, fresh, settings)
            assert verify(fresh, "tiny") == ()
            prune(fresh, now_s=time.time() + 7200)
            left = [str(p.relative_to(fresh / "models")) for p in (fresh / "models").iterdir()]
            assert sorted(left) == [".partial", "tiny"]
        assert n_killed > 7 and 0 < n_installed < n_killed


def test_replacing_a_model_keeps_the_old_or_the_new_one(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", SampleModel())
    gguf = (tmp_path / "tiny.gguf").read_bytes()
    source = HubSource("acme/tiny", files=(PinnedFile("tiny.gguf", len(gguf), sha256(gguf)),))
    entry = ModelEntry("tiny", "Tiny", "llama", "gguf", "x", (source,))
    with running(FakeHub(files={"tiny.gguf": gguf}, lfs={"tiny.gguf"})) as hub, Puller(hub, gguf) as puller:
        data = tmp_path / "data"
        pull(entry, data, HubSettings(endpoint=hub.hub_url))
        n_absent = 0
        for last_operation in range(1, 200, 8):
            if puller.run_until(data, last_operation) == 0:
                break
            models = list_installed(data)
            n_absent += not models
            assert [m.problem for m in models] in ([], [None])
            pull(entry, data, HubSettings(endpoint=hub.hub_url))
            assert verify(data, "tiny") == ()
        assert last_operation > 20 and n_absent <= 1
