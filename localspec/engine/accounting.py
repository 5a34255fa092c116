"""What a landed step means for everybody who counts: the tuner, the counters, the clocks of the requests.

Runs on the decode thread; knows results and milliseconds, nothing of the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from localspec.core.records import Request, SlotResult
from localspec.engine.metrics import MetricsRecorder, RequestClock, StepCount
from localspec.engine.ring import Landed
from localspec.engine.shadow import TextShadow
from localspec.engine.tuner import CONTEXT_BUCKET_TOKENS, OFF, Arm, Tuner
from localspec.engine.verify_schedule import VerifySchedule
from localspec.scheduler.sequence import Sequence


class Counted(Protocol):
    """A running request as far as it is counted."""

    request: Request
    clock: RequestClock
    sequence: Sequence | None


@dataclass
class StepAccounting:
    """`lag`: windows between a result and the plan that knows it; `schedule`: learns too, where there is one."""

    tuner: Tuner
    metrics: MetricsRecorder
    lag: int
    schedule: VerifySchedule | None = None

    def __post_init__(self) -> None:
        self._shadows: dict[int, TextShadow] = {}

    def count(self, landed: Landed, tickets: Mapping[int, Counted]) -> None:
        """A verify step landed. `tickets` by sequence id; results of requests that are gone count for nobody."""
        now = time.perf_counter()
        active = len(landed.results)
        arms: list[Arm] = []
        counts = []
        contexts = [0]
        windows: list[list[float]] = []
        for result, planned in zip(landed.results, landed.outcome.planned.slots, strict=True):
            arm = (planned.drafter, planned.num_drafts) if planned.num_drafts else OFF
            arms.append(arm)
            ticket = tickets.get(result.sequence_id)
            if ticket is None or ticket.sequence is None:
                continue
            sequence = ticket.sequence
            contexts.append(sequence.length_bound_tokens)
            phase = self.tuner.see_window(
                sequence, active, arm, result.drafted_by, result.num_accepted, result.num_offered
            )
            if self.schedule is not None:
                windows.append(self.schedule.see(result))
            self._follow(sequence, active, result)
            plain_ms = self._plain_ms(result, sequence, active, landed.verify_ms)
            _count_request(ticket.clock, result, landed, now, plain_ms)
            work = ticket.clock.work[result.drafter, phase]
            work.see(result, landed.draft_ms, landed.verify_ms, plain_ms)
            counts.append(StepCount(result, phase, ticket.request.client, plain_ms))
        ran = landed.outcome.ran
        rows = ran.graph_key.num_rows if self.tuner.fixed_rows else ran.num_rows
        self.tuner.known.see_step(max(contexts), rows, arms, landed.draft_ms, landed.verify_ms, landed.wait_ms)
        if self.schedule is not None:
            curve = self.tuner.known.verify_curve(max(contexts) // CONTEXT_BUCKET_TOKENS)
            self.schedule.see_step(windows, curve, landed.draft_ms)
        self.metrics.count_step(counts, landed.draft_ms, landed.verify_ms)

    def _follow(self, sequence: Sequence, active: int, result: SlotResult) -> None:
        shadow = self._shadows.get(sequence.id)
        if shadow is None:
            request = sequence.request
            shadow = self._shadows[sequence.id] = TextShadow(request.prediction_ids, request.prompt_ids, self.lag)
        for window in shadow.follow(result.token_ids, self.tuner.known.room(active)):
            self.tuner.see_shadow(sequence, active, window.run, window.is_sure, window.is_echo)
        for is_sure, is_right in shadow.told:
            self.tuner.see_text(sequence, active, is_sure, is_right)
        self.tuner.see_echo(sequence, shadow.repeats)
        if result.finish:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._shadows.pop(sequence.id, None)
        self.tuner.forget(sequence)

    def _plain_ms(self, result: SlotResult, sequence: Sequence, active: int, verify_ms: float) -> float:
        """What the tokens of a step would have cost without drafts: a step without drafts is its own measure."""
        if not result.num_drafted:
            return verify_ms
        plain = self.tuner.plain_ms_per_token(active, sequence.length_bound_tokens)
        return len(result.token_ids) * plain if plain is not None else verify_ms


def _count_request(clock: RequestClock, result: SlotResult, landed: Landed, now: float, plain_ms: float) -> None:
    step_ms = landed.draft_ms + landed.verify_ms
    clock.first_step_s = clock.first_step_s if clock.first_step_s is not None else now - step_ms / 1e3
    clock.last_step_s = now
    clock.steps += 1
    clock.tokens += len(result.token_ids)
    clock.draft_ms += landed.draft_ms
    clock.verify_ms += landed.verify_ms
    clock.plain_ms += plain_ms
    clock.drafts.see(result.num_drafted, result.num_accepted)
