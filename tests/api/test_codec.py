"""Records survive the way through JSON, and wrong values are named."""

from __future__ import annotations

import json

import pytest

from localspec.api.codec import event_from_json, event_to_json, from_json, to_json
from localspec.api.types import (
    ClientMetrics,
    Delta,
    Done,
    DrafterMetrics,
    Event,
    GenerateRequest,
    Grammar,
    Message,
    MetricsSnapshot,
    ModelInfo,
    Phase,
    Prefill,
    Queued,
    Sampling,
    Span,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)

EVENTS: list[Event] = [
    Queued(3),
    Delta("ab", (1, 2), (Span(1, "ngram", Phase.THINKING), Span(1, "", Phase.TOOL_CALL)), 3),
    Delta("", (), ()),
    Prefill(1, 2, 1, "no cache"),
    Delta("ab", (1, 2), (Span(2, "ngram", Phase.THINKING),), 1, (TokenLogprob(1, "a", -0.5, ((1, "a", -0.5),)),)),
    Done("length", Usage(1, 2), Timings(accepted_per_position=(3, 1), speedup_vs_plain=1.5), "END"),
]
RECORDS = [
    GenerateRequest(
        messages=(Message("assistant", "x", "y", (ToolCall("1", "f", "{}"),)), Message("tool", "z", tool_call_id="1")),
        sampling=Sampling(0.5, seed=7, logit_bias=((3, -100.0),)),
        tools=({"type": "function"},),
        grammar=Grammar("json_schema", "{}"),
    ),
    MetricsSnapshot(
        drafters=(DrafterMetrics("ngram", 1, 2, 1, (1, 1), (1,)),), clients=(ClientMetrics("a"),), tiers={"x": 1.5}
    ),
    ModelInfo("m", "M", 10, 20),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_survive_and_unknown_keys_are_ignored(record: object) -> None:
    data = json.loads(json.dumps(to_json(record)))
    data["from_the_future"] = 1
    assert from_json(type(record), data) == record


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"kind": "queued", "position": "1"}, r"Queued\.position"),
        ({"kind": "queued", "position": True}, r"Queued\.position"),
        ({"kind": "queued"}, "lacks position"),
        ({"kind": "delta", "text": "", "token_ids": [1, "2"], "spans": []}, r"token_ids\[1\]"),
        (
            {"kind": "delta", "text": "", "token_ids": [], "spans": [{"n_chars": 1, "origin": "", "phase": "x"}]},
            "phase",
        ),
        ({"kind": "delta", "text": "", "token_ids": [], "spans": [], "rejected": True}, "rejected"),
        ({"kind": "delta", "text": "", "token_ids": [True], "spans": []}, r"token_ids\[0\]"),
        ({"kind": "delta", "text": 1, "token_ids": [], "spans": []}, r"Delta\.text"),
        ({"kind": "delta", "text": "", "token_ids": [], "spans": [[]]}, r"spans\[0\]"),
        ({"kind": "delta", "text": "", "token_ids": [], "spans": [{"n_chars": 1.5, "origin": "", "phase": ""}]}, "n_"),
        ({"kind": "delta", "text": "", "token_ids": [], "spans": [], "logprobs": [{}]}, "logprobs"),
        ({"kind": "nothing"}, "kind"),
        ([], "kind"),
    ],
)
def test_wrong_values_are_named(data: object, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        event_from_json(data)
