"""Results on their way to the host: copied to pinned memory, read one step late, waited for in this one place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from localspec.core.records import SlotResult, StepResult
from localspec.engine.device_step import StepClock
from localspec.engine.step import VerifyOutcome

_FINISH: tuple[Literal["", "stop", "length"], ...] = ("", "stop", "length")


BufferKey = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Landed:
    """A step whose results the host has. wait_ms: between the end of the step before and its start, where one was
    under way when it was given to the device; None where the device may have had nothing to do, or something else."""

    outcome: VerifyOutcome
    results: tuple[SlotResult, ...]
    draft_ms: float
    verify_ms: float
    wait_ms: float | None


@dataclass(frozen=True)
class _InFlight:
    outcome: VerifyOutcome
    host: dict[str, torch.Tensor]
    event: torch.cuda.Event | None
    before: StepClock | None


class ResultRing:
    """`lag` steps stay in flight: 0 where the host knows device values at once, 1 on a GPU."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._in_flight: deque[_InFlight] = deque()
        self._free: dict[BufferKey, list[torch.Tensor]] = {}

    def push(self, outcome: VerifyOutcome) -> None:
        """Start the copy of a step's results."""
        result = outcome.result
        fields = {
            "token_ids": result.token_ids,
            "num_emitted": result.num_emitted,
            "origins": result.origins,
            "num_accepted": result.num_accepted,
            "finish": result.finish,
            "num_drafts": outcome.draft.num_drafts,
            "draft_origins": outcome.draft.origins,
        }
        optional = {
            "logprobs": result.logprobs,
            "top_ids": result.top_ids,
            "top_logprobs": result.top_logprobs,
            "confidence": outcome.draft.confidence,
            "num_offered": outcome.draft.num_offered,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        event = None
        if result.token_ids.is_cuda:
            host = {name: self._pinned(name, value) for name, value in fields.items()}
            for name, value in fields.items():
                host[name].copy_(value, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        else:
            host = fields
        before = self._in_flight[-1].outcome.clock if self._in_flight else None
        self._in_flight.append(_InFlight(outcome, host, event, before))

    def _pinned(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A pinned buffer of the value's form; made once, since pinning takes longer than a step may."""
        free = self._free.setdefault(_buffer_key(name, value), [])
        return free.pop() if free else torch.empty(value.shape, dtype=value.dtype, pin_memory=True)

    def _give_back(self, entry: _InFlight) -> None:
        if entry.event is not None:
            for name, buffer in entry.host.items():
                self._free[_buffer_key(name, buffer)].append(buffer)

    def pop(self, drain: bool = False) -> list[Landed]:
        """Steps that are due; with `drain` all of them."""
        keep = 0 if drain else self.lag
        landed = []
        while len(self._in_flight) > keep:
            entry = self._in_flight.popleft()
            if entry.event is not None:
                entry.event.synchronize()
            clock = entry.outcome.clock
            wait_ms = clock.since_ms(entry.before) if entry.before is not None else None
            landed.append(Landed(entry.outcome, _slot_results(entry), *clock.intervals_ms(), wait_ms))
            self._give_back(entry)
        return landed


def _buffer_key(name: str, value: torch.Tensor) -> BufferKey:
    return name, tuple(value.shape), value.dtype


def _slot_results(entry: _InFlight) -> tuple[SlotResult, ...]:
    values = {name: value.tolist() for name, value in entry.host.items()}
    result: StepResult = entry.outcome.result
    names, drafters = result.origin_names, entry.outcome.draft.origin_names
    slots = []
    for plan in entry.outcome.ran.slots:
        s = plan.slot
        count = int(values["num_emitted"][s])
        drafted = min(plan.num_drafts, int(values["num_drafts"][s]))
        offered = int(values["num_offered"][s]) if "num_offered" in values else None
        told = drafted if offered is None else offered
        slots.append(
            SlotResult(
                slot=s,
                sequence_id=plan.sequence_id,
                token_ids=tuple(values["token_ids"][s][:count]),
                origins=tuple(names[code] for code in values["origins"][s][:count]),
                num_drafted=drafted,
                num_accepted=int(values["num_accepted"][s]),
                drafter=plan.drafter,
                finish=_FINISH[int(values["finish"][s])],
                logprobs=tuple(values["logprobs"][s][:count]) if "logprobs" in values else (),
                top=_top(values, s, count),
                drafted_by=tuple(drafters[code] for code in values["draft_origins"][s][:drafted]),
                offered_by=tuple(drafters[code] for code in values["draft_origins"][s][:told]),
                confidence=tuple(values["confidence"][s][:told]) if "confidence" in values else (),
                num_offered=offered,
            )
        )
    return tuple(slots)


def _top(
    values: dict[str, list[list[list[float]]]], slot: int, count: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    if "top_ids" not in values:
        return ()
    pairs = zip(values["top_ids"][slot][:count], values["top_logprobs"][slot][:count], strict=True)
    return tuple(tuple((int(i), float(p)) for i, p in zip(ids, probs, strict=True)) for ids, probs in pairs)
