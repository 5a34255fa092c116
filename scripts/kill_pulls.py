"""Pulls that die: at every file operation, and by SIGKILL at random moments. What is left must be whole or absent.

    PYTHONPATH=. python scripts/kill_pulls.py [--random 60] [--seed 1]

The hub is the one of the tests, on this machine. Three pulls die: a GGUF file that is converted, a checkpoint of
several files, and single tensors by their ranges. After each death the installed models must pass `verify` or not be
there, the next pull must finish the work, and bytes that a sidecar records as there may not be asked for again; the
script ends at the first that is otherwise. Prints a line for each kind and keeps the counts in
scripts/results/kill_pulls.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hub"))

import numpy as np
from hub_fake_server import FakeHub, running
from hub_gguf_samples import SampleModel, write_model
from safetensors.numpy import save

from localspec.hub.catalogue import Catalogue, DrafterEntry, HubSource, ModelEntry
from localspec.hub.get import Wish, get
from localspec.hub.gguf_architectures import PEEK_BYTES
from localspec.hub.local import list_installed, prune, verify
from localspec.hub.pull import drafters_directory
from localspec.hub.records import HubSettings

RESULTS = Path(__file__).parent / "results" / "kill_pulls.json"
OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "pwrite")
MOST_OPERATIONS = 400
CHILD = "import sys; sys.path[:0] = [{root!r}, {here!r}]; import kill_pulls; kill_pulls.child(sys.argv[1:])"


@dataclass(frozen=True)
class Kind:
    """One way to pull. `name` is what is asked for, `drafter` whether it lands among the drafters."""

    name: str
    drafter: bool = False


KINDS = {"gguf": Kind("gguf"), "checkpoint": Kind("parts"), "tensors": Kind("parts.mtp", drafter=True)}


def catalogue() -> Catalogue:
    gguf = ModelEntry("gguf", "G", "llama", "gguf", "x", (HubSource("acme/gguf", include=("m.gguf",)),))
    source = HubSource("acme/parts", include=("*.safetensors", "*.json"))
    drafters = (DrafterEntry("mtp", "acme/parts"),)
    return Catalogue((gguf, ModelEntry("parts", "P", "llama", "bf16", "x", (source,), drafters=drafters)))


def settings(url: str) -> HubSettings:
    return HubSettings(endpoint=url, range_bytes=60_000, n_connections=1, backoff_s=0.01, allow_pip=False)


def child(arguments: list[str]) -> None:
    """The pull that dies: `last` is the operation at which it ends itself, 0 for never."""
    url, data, kind, last = arguments
    count = 0

    def deadly(operation):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == int(last):
                os._exit(137)
            return operation(*args, **kwargs)

        return run

    for name in OPERATIONS:
        setattr(os, name, deadly(getattr(os, name)))
    get(catalogue(), Wish(KINDS[kind].name, ("none",), force=True), Path(data), settings(url))


def start(hub: FakeHub, data: Path, kind: str, last: int) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    code = CHILD.format(root=str(here.parent), here=str(here))
    command = [sys.executable, "-c", code, hub.hub_url, str(data), kind, str(last)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def held_bytes(folder: Path) -> int:
    """Bytes that sidecars record as there, over a folder of unfinished pulls."""
    records = [json.loads(path.read_text()) for path in folder.rglob("*.part.json")]
    return sum(end - first for record in records for first, end in record["done"])


def check_and_finish(hub: FakeHub, data: Path, kind: str) -> bool:
    """Whether the model was there after the death; raises AssertionError for anything half done."""
    place = drafters_directory(data) if KINDS[kind].drafter else data
    models = list_installed(place)
    assert [model.problem for model in models] in ([], [None]), models
    for model in models:
        assert verify(place, model.model_id) == (), model
    held = held_bytes(place / "models" / ".partial")
    about = hub if kind == "gguf" else hub.others[0]
    about.log.clear()
    get(catalogue(), Wish(KINDS[kind].name, ("none",)), data, settings(hub.hub_url))
    # Of a GGUF file the first bytes are looked at, of weight files their headers; probes take a byte each.
    looked_at = PEEK_BYTES if kind == "gguf" else 2_000
    fetched = sum(entry.sent_bytes for entry in about.log)
    total = sum(len(content) for content in about.files.values())
    assert fetched <= total - held + looked_at + 100, (fetched, total, held)
    (model,) = list_installed(place)
    assert verify(place, model.model_id) == ()
    prune(place, now_s=time.time() + 7200)
    left = sorted(path.name for path in (place / "models").iterdir() if path.name != "pins.json")
    assert left in ([".partial", model.model_id], [".partial", ".pins.json.lock", model.model_id]), left
    return bool(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=60, help="SIGKILLs at random moments for each kind.")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, rows = random.Random(arguments.seed), {}
    with tempfile.TemporaryDirectory() as scratch, running(make_hub(Path(scratch))) as hub:
        for kind in KINDS:
            began_s, n_killed, n_there = time.monotonic(), 0, 0
            for last in range(1, MOST_OPERATIONS):
                data = Path(scratch) / f"{kind}-{last}"
                code = start(hub, data, kind, last).wait(60)
                if code == 0:
                    break
                assert code == 137, code
                n_killed, n_there = n_killed + 1, n_there + check_and_finish(hub, data, kind)
            begin_s = time.monotonic()
            start(hub, Path(scratch) / f"{kind}-whole", kind, 0).wait(60)
            whole_s, n_random, n_random_there = time.monotonic() - begin_s, 0, 0
            for number in range(arguments.random):
                data = Path(scratch) / f"{kind}-random-{number}"
                process = start(hub, data, kind, 0)
                time.sleep(rng.uniform(0.2, 1.0) * whole_s)
                process.send_signal(signal.SIGKILL)
                n_random += process.wait() == -signal.SIGKILL
                n_random_there += check_and_finish(hub, data, kind)
            rows[kind] = {
                "operations": n_killed, "whole_after": n_there, "random_kills": n_random,
                "whole_after_random": n_random_there, "seconds": round(time.monotonic() - began_s, 1),
            }  # fmt: skip
            print(kind, json.dumps(rows[kind]), flush=True)
    document = {"seed": arguments.seed, "kinds": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def make_hub(scratch: Path) -> FakeHub:
    write_model(scratch / "m.gguf", SampleModel())
    weights = {f"w{i}.safetensors": save({f"mtp.{i}": np.zeros(50_000, np.float32)}) for i in range(3)}
    config = {"model_type": "llama"}
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", **weights}
    hub = FakeHub(repo="acme/gguf", files={"m.gguf": (scratch / "m.gguf").read_bytes()}, lfs={"m.gguf"})
    hub.others = [FakeHub(repo="acme/parts", files=files, lfs=set(weights))]
    return hub


if __name__ == "__main__":
    main()
