"""Counters of the engine by drafter, phase and client, and what a request's own clock tells."""

from __future__ import annotations

from localspec.api.types import MetricsSnapshot
from localspec.core.records import SlotResult
from localspec.engine.metrics import MAX_CLIENTS, OTHER_CLIENTS, MetricsRecorder, RequestClock, StepCount


def result(drafter: str, drafted: int, accepted: int, sequence_id: int = 1) -> SlotResult:
    tokens = tuple(range(accepted + 1))
    return SlotResult(0, sequence_id, tokens, ("target",) * len(tokens), drafted, accepted, drafter, "")


def test_steps_are_counted_by_drafter_phase_and_client() -> None:
    recorder = MetricsRecorder(MetricsSnapshot())
    recorder.count_step([StepCount(result("mtp", 3, 2), "thinking", "editor", 30.0)], 4.0, 8.0)
    recorder.count_step(
        [
            StepCount(result("mtp", 3, 0), "thinking", "editor", 10.0),
            StepCount(result("off", 0, 0, 2), "answer", "chat", 10.0),
        ],
        2.0,
        10.0,
    )
    snapshot = recorder.snapshot()
    work = {(w.drafter, w.phase, w.client): w for w in snapshot.work}
    mtp = work["mtp", "thinking", "editor"]
    assert (mtp.steps, mtp.tokens, mtp.drafts, mtp.drafted_tokens, mtp.accepted_tokens) == (2, 4, 2, 6, 2)
    assert mtp.drafted_per_position == (2, 2, 2) and mtp.accepted_per_position == (1, 1)
    assert (mtp.draft_ms, mtp.verify_ms) == (5.0, 13.0), "sequences of a step share its time"
    assert mtp.plain_ms == 35.0
    off = work["off", "answer", "chat"]
    assert (off.steps, off.tokens, off.drafts, off.draft_ms, off.verify_ms) == (1, 1, 0, 1.0, 5.0)
    [drafter] = snapshot.drafters
    assert (drafter.name, drafter.drafts, drafter.draft_ms) == ("mtp", 2, 5.0)
    assert snapshot.completion_tokens_total == 5 and snapshot.draft_ms == 6.0 and snapshot.verify_ms == 18.0


def test_clients_that_name_themselves_anew_each_time_are_counted_together() -> None:
    recorder = MetricsRecorder(MetricsSnapshot())
    for number in range(3 * MAX_CLIENTS):
        recorder.count_request(f"client {number}", 5, 0)
        recorder.count_step([StepCount(result("off", 0, 0), "answer", f"client {number}", 1.0)], 0.0, 1.0)
    snapshot = recorder.snapshot()
    assert len(snapshot.clients) <= MAX_CLIENTS + 1 and len(snapshot.work) <= MAX_CLIENTS + 1
    others = next(client for client in snapshot.clients if client.name == OTHER_CLIENTS)
    assert others.requests == 2 * MAX_CLIENTS and sum(client.requests for client in snapshot.clients) == 3 * MAX_CLIENTS


def test_a_requests_own_figures() -> None:
    clock = RequestClock(first_step_s=1.0, last_step_s=1.5, steps=3, tokens=7, draft_ms=100.0, verify_ms=300.0)
    clock.plain_ms = 800.0
    for drafted, accepted in ((3, 2), (0, 0), (2, 2)):
        clock.drafts.see(drafted, accepted)
    timings = clock.timings(cached_tokens=4)
    assert timings.draft_steps == 2 and timings.draft_n == 5 and timings.draft_n_accepted == 4
    assert timings.drafted_per_position == (2, 2, 1) and timings.accepted_per_position == (2, 2)
    assert timings.tok_per_s == 14.0 and timings.speedup_vs_plain == 2.0 and timings.cached_tokens == 4
