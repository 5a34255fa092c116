"""A tiny random model, its drafters and a cache directory: engines over them, for tests of the tiers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localspec.api.types import Sampling
from localspec.cache.spill import SpillLimits
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS
from localspec.drafters import Drafter, DrafterSetup, drafter_module
from localspec.engine.build import Assembled, EngineOptions, assemble
from localspec.engine.tiers import HostAndDisk
from localspec.kernels.backends.reference import ReferenceOps
from localspec.models import Model
from localspec.scheduler.scheduler import PROMPT_TAIL_TOKENS
from tests.helpers.engine import Collected, make_request, run
from tests.helpers.models import load_model, random_checkpoint, reference_ops

LIMIT = 1024
WIDE = SpillLimits(cap_bytes=1 << 30, min_free_bytes=0)
LAW = Sampling(temperature=0.8, top_k=30, top_p=0.95)


class Machine:
    """A model and a cache directory; every `engine` over it is a start of the program."""

    def __init__(self, kind: str, folder: Path, drafters: tuple[str, ...] = ("ngram", "mtp")) -> None:
        self.ops: ReferenceOps = reference_ops()
        self.model: Model = load_model(random_checkpoint(kind, 3, folder / "model"), self.ops)
        self.kv_dir = folder / "kv"
        self.drafter_names = drafters

    def drafters(self) -> dict[str, Drafter]:
        setup = DrafterSetup(ops=self.ops, model=self.model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
        return {name: drafter_module(name).tiny(setup) for name in self.drafter_names}

    @contextmanager
    def engine(
        self, kv_dir: Path | None = None, limits: SpillLimits = WIDE, host_bytes: int = 1 << 28
    ) -> Iterator[Assembled]:
        options = EngineOptions(
            device="cpu", kv_dir=kv_dir or self.kv_dir, kv_limits=limits, host_bytes=host_bytes
        )  # fmt: skip
        parts = assemble(self.model, self.ops, LIMIT, self.drafters(), options)
        parts.loop.start()
        try:
            yield parts
        finally:
            parts.loop.stop()

    @contextmanager
    def engine_without(self) -> Iterator[Assembled]:
        parts = assemble(self.model, self.ops, LIMIT, self.drafters(), EngineOptions(device="cpu"))
        parts.loop.start()
        try:
            yield parts
        finally:
            parts.loop.stop()


def prompt_ids(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    phrase = [generator.randrange(90) for _ in range(11)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if generator.random() < 0.6 else [generator.randrange(90) for _ in range(3)]
    return ids[:length]


def eager(parts: Assembled) -> None:
    """Read whatever there is, however fast this machine computes tiny models."""
    tiers = parts.loop.tiers
    assert isinstance(tiers, HostAndDisk)
    tiers._worth_reading = lambda tokens, size: True  # type: ignore[method-assign]


def usable(parts: Assembled, num_tokens: int) -> int:
    """Tokens that come from disk for a prompt that was asked before: a hybrid resumes from a page near its end."""
    if not parts.scheduler.needs_state:
        return num_tokens - 1
    return (num_tokens - 1 - PROMPT_TAIL_TOKENS) // PAGE_TOKENS * PAGE_TOKENS


def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def facts(items: list[Collected]) -> list[tuple[list[int], list[float]]]:
    return [(item.token_ids, item.logprobs) for item in items]


def leave_only(parts: Assembled, tier: str) -> None:
    """Empty every tier above the named one, after the turns before have reached it."""
    tiers = parts.loop.tiers
    assert isinstance(tiers, HostAndDisk)
    wait(lambda: not tiers.num_waiting)
    if tier != "device":
        parts.loop.call(parts.scheduler.prefix.clear).result(20)
    if tier == "disk":
        tiers._pool.clear()


@dataclass(frozen=True)
class TiersCompared:
    """Whether tokens, log-probabilities and acceptance were the same from every tier; drafts that were accepted."""

    equal: bool
    accepted: int


def compare_tiers(machine: Machine, folder: Path, num_tokens: int, count: int) -> TiersCompared:
    """First turns of about `num_tokens`, then `count` second turns at once, with everything on the device, then with
    nothing above host memory, then with nothing above the disk."""
    # Hot, so that the shared noise decides and random drafters are right often; 4 x (1 + 3) rows fill a step, so no
    # window is cut because of who else happens to run.
    asks = [
        dict(drafter=drafter, depth=3, logprobs=0, sampling=Sampling(temperature=9.0), seed=seed, chat_id=f"c{seed}")
        for seed, drafter in enumerate(("mtp", "eagle3", "ngram", "ngram+mtp")[:count])
    ]
    firsts = [prompt_ids(seed, num_tokens + 3 * seed) for seed in range(count)]
    seen: dict[str, list[Collected]] = {}
    for tier in ("device", "host", "disk"):
        with machine.engine(folder / tier) as parts:
            eager(parts)
            ones = run(parts, [make_request(f, max_tokens=8, **a) for f, a in zip(firsts, asks, strict=True)])
            seconds = [[*f, *o.token_ids, *prompt_ids(7, 9)] for f, o in zip(firsts, ones, strict=True)]
            leave_only(parts, tier)
            again = [make_request(s, max_tokens=12, private=True, **a) for s, a in zip(seconds, asks, strict=True)]
            seen[tier] = run(parts, again)
            figures = parts.metrics.snapshot().tiers
            assert (figures["host_restore_mb_per_s"] > 0) == (tier == "host")
            assert (figures["ssd_restore_mb_per_s"] > 0) == (tier == "disk")
            for item, first in zip(seen[tier], firsts, strict=True):
                assert item.cached_tokens == len(first) + 7
    counts = {
        tier: [item.end.timings.accepted_per_position for item in items if item.end is not None]
        for tier, items in seen.items()
    }
    same = all(facts(seen[t]) == facts(seen["device"]) and counts[t] == counts["device"] for t in ("host", "disk"))
    return TiersCompared(same, sum(map(sum, counts["device"])))
