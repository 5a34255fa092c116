"""What the tuner learnt, kept between runs: one JSON file per device, model, drafters and build.

Torch-free. The file is a cache: a damaged or foreign one is left out, and losing it costs some trials. The decode
thread only turns the tuner into plain values; whoever calls `TunerStore.write` does the writing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.api.types import EngineError
from localspec.core.records import MAX_ROWS
from localspec.engine.acceptance import MAX_POSITIONS, Acceptance, Counts, Speech
from localspec.engine.knowledge import COPYING
from localspec.engine.step_costs import LEAST_MS, Mean
from localspec.engine.tuner import Tuner, Work

log = logging.getLogger(__name__)
FORMAT = 2
MAX_FILE_BYTES = 4 << 20
MAX_COUNT = float(1 << 53)
SAVE_EVERY_S = 180.0
WAIT_S = 10.0


@dataclass(frozen=True)
class TunerKey:
    """What measured times and acceptances depend on."""

    device: str
    model: str
    drafters: tuple[str, ...]
    build: str


class TunerStore:
    """The file of one key in a folder."""

    def __init__(self, folder: Path, key: TunerKey) -> None:
        self._key: dict[str, Any] = {**asdict(key), "drafters": list(key.drafters)}
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{digest}.json"

    def restore(self, tuner: Tuner) -> bool:
        """Give a fresh tuner what was learnt before; False where there is nothing that can be used."""
        document = read_document(self.path)
        if document is None or document["key"] != self._key:
            return False
        fill(tuner, document)
        return True

    def write(self, learnt: Mapping[str, Any]) -> None:
        """Replace the file in one piece by what `to_json` gave. A disk that refuses costs only the memory."""
        text = json.dumps({"format": FORMAT, "key": self._key, **learnt})
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.touch(mode=0o600)
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.path)
        except OSError as error:
            log.warning("what the tuner learnt could not be kept: %s", error)

    def remove(self) -> None:
        """Forget it."""
        self.path.unlink(missing_ok=True)


def to_json(tuner: Tuner) -> dict[str, Any]:
    """Everything learnt, in plain values. Call it where nothing changes the tuner meanwhile."""
    state = tuner.learnt
    return {
        "acceptance": [
            [
                method,
                phase,
                list(known.long_run),
                list(known.now.hits),
                list(known.now.seen),
                known.prior_weight,
                known.steps,
            ]
            for (method, phase), known in state.acceptance.items()
        ],
        "speech": [[method, phase, known.share, known.count] for (method, phase), known in state.speech.items()],
        "drafted": [[method, phase, known.value, known.count] for (method, phase), known in state.drafted.items()],
        "costs": [
            [
                bucket,
                [[rows, mean.value, mean.count] for rows, mean in table.verify.items()],
                [[method, depth, mean.value, mean.count] for (method, depth), mean in table.draft.items()],
            ]
            for bucket, table in state.costs.items()
        ],
        "work": [[phase, active, list(work.current)] for (phase, active), work in tuner.work.items()],
    }


def fill(tuner: Tuner, document: Mapping[str, Any]) -> None:
    """Put a checked document into a tuner; methods that it does not have are left out."""
    methods = {"off", *tuner.depth_limits}
    state = tuner.learnt
    for method, phase, long_run, hits, seen, prior_weight, steps in document["acceptance"]:
        name = method.rstrip("!")
        if name in methods:
            state.acceptance[method, phase] = Acceptance(
                copies=name in COPYING,
                long_run=list(long_run),
                now=Counts(list(hits), list(seen)),
                steps=steps,
                prior_weight=prior_weight,
            )
    for method, phase, share, count in document["speech"]:
        if method.rstrip("!") in methods:
            state.speech[method, phase] = Speech(share, count)
    for method, phase, drafts, count in document["drafted"]:
        if method in methods:
            state.drafted[method, phase] = Mean(drafts, count)
    for bucket, verify, draft in document["costs"]:
        table = tuner.known.costs_of(bucket)
        table.verify.update({rows: Mean(max(ms, LEAST_MS), count) for rows, ms, count in verify})
        table.draft.update(
            {(method, depth): Mean(max(ms, LEAST_MS), count) for method, depth, ms, count in draft if method in methods}
        )
    for phase, active, (method, depth) in document["work"]:
        if method in methods and depth <= tuner.depth_limits.get(method, 0):
            tuner.work[phase, active] = Work(current=(method, depth))


def saved_tuner(document: Mapping[str, Any]) -> Tuner:
    """A tuner that knows what a document holds, to explain it."""
    limits: dict[str, int] = {}
    for _, _, draft in document["costs"]:
        for method, depth, _, _ in draft:
            limits[method] = max(limits.get(method, 0), depth)
    for name in (entry[2][0] for entry in document["work"]):
        if name != "off":
            limits.setdefault(name, MAX_ROWS - 1)
    tuner = Tuner(limits)
    fill(tuner, document)
    return tuner


def read_document(path: Path) -> dict[str, Any] | None:
    """A state file whose every value has been checked, or None."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document["format"] != FORMAT or not isinstance(document["key"], dict):
            return None
        _check(document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return document


def _check(document: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError for values that no tuner wrote."""
    for method, phase, long_run, hits, seen, prior_weight, steps in document["acceptance"]:
        _need(isinstance(method, str) and isinstance(phase, str) and len(long_run) <= MAX_POSITIONS)
        _need(len(hits) == len(seen) == MAX_POSITIONS and _is_count(steps) and _is_amount(prior_weight))
        _need(all(_is_amount(rate) and rate <= 1 for rate in long_run) and all(map(_is_amount, (*hits, *seen))))
        _need(all(hit <= count for hit, count in zip(hits, seen, strict=True)))
    for name in ("speech", "drafted"):
        for method, phase, value, count in document[name]:
            _need(isinstance(method, str) and isinstance(phase, str) and _is_count(count) and _is_amount(value))
            _need(value <= (1 if name == "speech" else MAX_ROWS))
    for bucket, verify, draft in document["costs"]:
        _need(_is_count(bucket))
        for rows, ms, count in verify:
            _need(_is_count(rows) and 0 < rows <= MAX_ROWS and _is_amount(ms) and ms > 0 and _is_count(count))
        for method, depth, ms, count in draft:
            _need(isinstance(method, str) and _is_count(depth) and 0 < depth < MAX_ROWS)
            _need(_is_amount(ms) and _is_count(count))
    for phase, active, (method, depth) in document["work"]:
        _need(isinstance(phase, str) and _is_count(active) and isinstance(method, str) and _is_count(depth))


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError("not a tuner's state")


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


class TunerKeeper:
    """Writes what a running tuner learns every few minutes, and at the end, from a thread of its own.

    `between_steps` runs a function on the decode thread; `steps` counts the verify steps so far.
    """

    def __init__(
        self,
        tuner: Tuner,
        store: TunerStore,
        between_steps: Callable[[Callable[[], None]], Future[None]],
        steps: Callable[[], int],
        every_s: float = SAVE_EVERY_S,
    ) -> None:
        self._tuner = tuner
        self._store = store
        self._between_steps = between_steps
        self._steps = steps
        self._every_s = every_s
        self._written_steps = steps()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tuner-store", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget what was learnt, here and on the disk. Waits for the running step."""
        self._between_steps(self._tuner.reset).result(WAIT_S)
        self._store.remove()

    def close(self) -> None:
        """The last write. Call it when the decode thread has ended."""
        self._closing.set()
        self._thread.join()
        if self._steps() != self._written_steps:
            self._store.write(to_json(self._tuner))

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            steps = self._steps()
            if steps == self._written_steps:
                continue
            try:
                self._store.write(self._copy())
            except (TimeoutError, EngineError):  # a long step, or the decode thread has ended; `close` writes then
                continue
            self._written_steps = steps

    def _copy(self) -> dict[str, Any]:
        """What is known between two steps. Raises TimeoutError, and EngineError where no step will come."""
        learnt: list[dict[str, Any]] = []
        self._between_steps(lambda: learnt.append(to_json(self._tuner))).result(WAIT_S)
        return learnt[0]
