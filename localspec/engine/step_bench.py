"""Times whole steps of a model on this device: rows, sequences, contexts, prefill, against measured floors.

Used with random weights of full size (`--synthetic`), so it knows shapes and bytes and nothing of what the model says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS, Draft, PrefillPlan, Request, SlotPlan, VerifyPlan
from localspec.engine.build import Assembled
from localspec.engine.device_step import StepNeeds
from localspec.engine.step_profile import profile_step
from localspec.sampling.processors import ProcessorPlan

STEPS_MARGIN_TOKENS = 512
"""Room behind the context for what timed steps may emit."""
GREEDY = StepNeeds(ProcessorPlan.for_requests((), 1))


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of a verify step, and the floor: bytes it must read over the measured read rate."""

    slots: int
    rows: int
    context_tokens: int
    step_ms: float
    floor_ms: float

    @property
    def over_floor(self) -> float:
        return self.step_ms / self.floor_ms


class StepBench:
    """Runs steps on an assembled engine whose loop is not started. The cache's contents do not matter."""

    def __init__(self, parts: Assembled, read_rate_bytes_per_s: float) -> None:
        self._runner = parts.runner
        self._stages = parts.loop.stages
        self._read_rate = read_rate_bytes_per_s
        self._per_slot_pages = self._runner.state.block_tables.shape[1]
        self._num_pages = parts.scheduler.pool.num_pages
        self._drafts: dict[int, Draft] = {}
        self.chunk_tokens = parts.scheduler.limits.chunk_tokens

    def verify(self, slots: int, rows_per_slot: int, context_tokens: int, repeats: int = 30) -> StepTime:
        """Time steps of `slots` sequences with `rows_per_slot` rows each at a context length."""
        step = self._step(slots, rows_per_slot, context_tokens, repeats + 1)
        with torch.inference_mode():
            step()
            times = [self._timed(step) for _ in range(repeats)]
        floor_ms = sum(self.floors_ms(slots, context_tokens).values())
        return StepTime(slots, slots * rows_per_slot, context_tokens, median(times), floor_ms)

    def groups(self, slots: int, rows_per_slot: int, context_tokens: int, repeats: int = 10) -> dict[str, float]:
        """Milliseconds of such a step by kernel group, see `profile_step`."""
        step = self._step(slots, rows_per_slot, context_tokens, 2 * repeats)
        with torch.inference_mode():
            step()
            return profile_step(step, self._runner.ops, repeats)

    def holds(self, slots: int, context_tokens: int) -> bool:
        """Whether the cache has pages for so many sequences of that length."""
        count = self._pages_of(context_tokens)
        fits_table = context_tokens + STEPS_MARGIN_TOKENS <= self._per_slot_pages * PAGE_TOKENS
        return fits_table and slots * count < self._num_pages

    def _step(self, slots: int, rows_per_slot: int, context_tokens: int, repeats: int) -> Callable[[], object]:
        for slot in range(slots):
            self._fill(slot, context_tokens)
        drafts = rows_per_slot - 1
        bound = context_tokens + repeats * rows_per_slot + 64
        plan = VerifyPlan(tuple(SlotPlan(slot, slot + 1, "ngram", drafts, bound) for slot in range(slots)))
        # A captured step reads the drafts that it was captured with, so they must stay.
        draft = self._drafts.setdefault(drafts, self._draft(drafts))
        return lambda: self._stages.device.verify(plan, draft, GREEDY)

    def prefill_tok_per_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Rate of reading a prompt of random tokens in chunks."""
        self._fill(0, prompt_tokens + 1)
        plans = [
            PrefillPlan(0, 1, start, min(start + chunk_tokens, prompt_tokens), "off")
            for start in range(0, prompt_tokens, chunk_tokens)
        ]
        with torch.inference_mode():
            self._stages.device.prefill(plans[0])
            seconds = self._timed(lambda: self._read(plans)) / 1e3
        return prompt_tokens / seconds

    def _read(self, plans: Sequence[PrefillPlan]) -> None:
        for plan in plans:
            self._stages.device.prefill(plan)

    def _fill(self, slot: int, length: int) -> None:
        vocab = self._runner.model.vocab_size
        prompt = tuple((7919 * i + slot) % min(vocab, 30000) for i in range(length))
        count = self._pages_of(length)
        pages = [1 + slot * count + index for index in range(count)]
        request = Request("", prompt, Sampling(), slot, 1 << 20, ())
        self._runner.admit(slot, request, pages, None)

    def _pages_of(self, length: int) -> int:
        return min(-(-(length + STEPS_MARGIN_TOKENS) // PAGE_TOKENS), self._per_slot_pages)

    def _draft(self, width: int) -> Draft:
        device = self._runner.ops.device
        tokens = torch.arange(MAX_SLOTS * width, device=device).reshape(MAX_SLOTS, width) % 1000
        counts = torch.full((MAX_SLOTS,), width, dtype=torch.int64, device=device)
        return Draft(tokens, torch.zeros_like(tokens), counts, ("ngram",))

    def floors_ms(self, slots: int, context_tokens: int) -> dict[str, float]:
        """By group: weights once; keys and values of the context; the recurrent state read and written once."""
        model = self._runner.model
        states = sum(state.total_bytes for state in model.cache_spec.states if not state.ring_rows)
        num_bytes = {
            "weights": model.read_bytes_per_token,
            "attention": slots * context_tokens * model.cache_spec.bytes_per_token,
            "gdn": slots * 2 * states,
        }
        return {group: size / self._read_rate * 1e3 for group, size in num_bytes.items()}

    def _timed(self, function: Callable[[], object]) -> float:
        device = self._runner.ops.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1e3


def matmul_rate_flop_per_s(device: torch.device, size: int = 8192, repeats: int = 8) -> float:
    """Best rate of a square bf16 matmul on random data."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def step_table(times: Sequence[StepTime]) -> str:
    """Steps for people."""
    lines = [f"{'slots':>5} {'rows':>4} {'context':>8} {'step ms':>8} {'floor ms':>8} {'ratio':>6}"]
    lines += [
        f"{t.slots:>5} {t.rows:>4} {t.context_tokens:>8} {t.step_ms:>8.3f} {t.floor_ms:>8.3f} {t.over_floor:>6.2f}"
        for t in times
    ]
    return "\n".join(lines)
