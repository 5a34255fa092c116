"""A tiny random model, its drafters and a cache directory: engines over them, for tests of the tiers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.helpers.engine import Collected
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


def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def facts(items: list[Collected]) -> list[tuple[list[int], list[float]]]:
    return [(item.token_ids, item.logprobs) for item in items]
