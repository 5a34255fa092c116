"""The device part of a step: propose, and verify with acceptance. Run call by call here, or as captured graphs.

Both forms run the same functions in the same order; `graphs.py` only replays them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from localspec.core.records import MAX_SLOTS, Draft, PrefillPlan, Request, StepResult, VerifyPlan
from localspec.engine.drafting import DrafterSet
from localspec.engine.verify_schedule import layout_rows
from localspec.runner.inputs import Layout, cut_to_draft, layout_numbers, layout_of
from localspec.runner.runner import Reading, Runner, VerifyOutput
from localspec.sampling.accept import RowRules, accept
from localspec.sampling.allowed import packed_rows, unpacked
from localspec.sampling.grammar import RequestGrammar
from localspec.sampling.processors import ProcessorPlan
from localspec.sampling.synthetic import SyntheticAcceptance
from localspec.sampling.thinking import ThinkingState, with_forced_drafts

MAX_MARKER_TOKENS = 8
"""Of the markers that open and end a thought."""


def _nothing() -> None:
    """No step before is under way."""


@dataclass(frozen=True)
class StepNeeds:
    """What the requests of a step ask of it, as far as the host knows: only that is computed.

    logprobs: alternatives at each token, None for no log-probabilities; thinking: some slot has a budget;
    grammars: by slot. A step with grammars waits for its drafts between forward pass and acceptance; `catch_up` is
    called then, and brings the grammars to where the step begins: what the step before said is known by that time.
    """

    law: ProcessorPlan
    logprobs: int | None = None
    thinking: bool = False
    grammars: Mapping[int, RequestGrammar] = field(default_factory=dict)
    catch_up: Callable[[], None] = _nothing


def position_bound(plan: VerifyPlan) -> int:
    """Host bound at or above every position of the step."""
    return max(slot.length_bound_tokens + slot.num_drafts for slot in plan.slots)


def layout_in(sent: Layout, draft: Draft, shared: bool) -> Layout:
    """The rows as the plan lays them out, or where slots share them as the drafts that were chosen do."""
    return layout_rows(draft.num_drafts, sent.counts > 0, sent.slots.shape[0]) if shared else sent


def by_slot(plan: VerifyPlan) -> VerifyPlan:
    """In the order in which shared rows lie."""
    return VerifyPlan(tuple(sorted(plan.slots, key=lambda entry: entry.slot)))


class StepClock(Protocol):
    """When a step began, had its drafts, and was verified; read after its results have landed."""

    def mark(self) -> None:
        """Take a time: at the start, after drafting, after verifying."""
        ...

    def done(self) -> bool:
        """Whether the last mark has been passed, so that reading the times does not wait."""
        ...

    def intervals_ms(self) -> tuple[float, float]:
        """Milliseconds drafting and verifying."""
        ...

    def since_ms(self, before: Self) -> float:
        """Milliseconds from the end of the step that `before` timed to the start of this one."""
        ...


class HostClock:
    """For devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(time.perf_counter())

    def done(self) -> bool:
        return True

    def intervals_ms(self) -> tuple[float, float]:
        start, drafted, verified = self._marks_s
        return (drafted - start) * 1e3, (verified - drafted) * 1e3

    def since_ms(self, before: Self) -> float:
        return (self._marks_s[0] - before._marks_s[-1]) * 1e3


class DeviceStep(Protocol):
    """What `step.py` calls."""

    def clock(self) -> StepClock:
        """A fresh clock for one step."""
        ...

    def admit(self, slot: int, request: Request) -> None:
        """A slot was given to a request."""
        ...

    def propose(self, plan: VerifyPlan, needs: StepNeeds) -> Draft:
        """Drafts for the plan's slots."""
        ...

    def verify(self, plan: VerifyPlan, draft: Draft, needs: StepNeeds) -> StepResult:
        """Run the windows, accept, and let drafters see the rows."""
        ...

    def prefill(self, plan: PrefillPlan) -> None:
        """Read a chunk of a prompt and let drafters see it."""
        ...

    def begin_prefill(self, plan: PrefillPlan) -> Reading:
        """The same, of which no layer has run yet."""
        ...

    def advance_prefill(self, reading: Reading, num_layers: int) -> bool:
        """Run the next layers of a chunk. With none left drafters see it, which counts as a layer more and is a part of
        its own unless more layers were asked for than there are. Whether they have seen it."""
        ...


class EagerStep:
    """Calls every stage directly."""

    def __init__(self, runner: Runner, drafters: DrafterSet, acceptance: SyntheticAcceptance | None = None) -> None:
        """`acceptance` forces drafts to be accepted at given rates; benchmarks only."""
        self.runner = runner
        self.drafters = drafters
        self.thinking = ThinkingState.make(MAX_SLOTS, MAX_MARKER_TOKENS, runner.ops.device)
        self._acceptance = acceptance

    def clock(self) -> StepClock:
        return HostClock()

    def admit(self, slot: int, request: Request) -> None:
        self.thinking.fill(slot, request.thinking)

    def propose(self, plan: VerifyPlan, needs: StepNeeds) -> Draft:
        return self.proposed(plan, needs)

    def proposed(self, plan: VerifyPlan, needs: StepNeeds) -> Draft:
        """The drafters' words, and those that a thinking budget dictates in their place."""
        draft = self.drafters.propose(plan, self.runner.state, needs.law.sampled)
        if not needs.thinking or not draft.token_ids.shape[1]:
            return draft
        return with_forced_drafts(self.thinking, draft, self.drafters.depths_of(plan), self.runner.state)

    def verify(self, plan: VerifyPlan, draft: Draft, needs: StepNeeds) -> StepResult:
        self.make_room(plan)
        pad_to = plan.num_rows if self.runner.ops.waits else plan.graph_key.num_rows
        numbers = torch.tensor(layout_numbers(plan, pad_to), dtype=torch.int64, device=self.runner.ops.device)
        layout = layout_in(layout_of(numbers), draft, plan.row_budget is not None)
        with_cold = self.runner.overflows_in(slot.slot for slot in plan.slots)
        output = self.runner.verify(layout, draft, position_bound(plan), with_cold)
        if not needs.grammars:
            return self.accepted(output, draft, needs, None)
        num_rows = output.logits.shape[0]
        packed = self.packed_masks(plan, draft.token_ids.tolist(), needs, num_rows).to(self.runner.ops.device)
        return self.accepted(output, draft, needs, packed)

    def make_room(self, plan: VerifyPlan) -> None:
        """A sequence that is larger than the device gives its oldest pages up before it writes new ones."""
        for slot in plan.slots:
            self.runner.make_room(slot.slot, slot.length_bound_tokens + slot.num_drafts)

    def verify_layout(self, layout: Layout, draft: Draft, max_position_bound: int, needs: StepNeeds) -> StepResult:
        """A whole step without grammars: device values only, so that a graph can hold it."""
        return self.accepted(self.runner.verify(layout, draft, max_position_bound), draft, needs, None)

    def accepted(self, output: VerifyOutput, draft: Draft, needs: StepNeeds, packed: Tensor | None) -> StepResult:
        """Acceptance, and the drafters' view of the rows. packed: [R, ceil(V / 8)] uint8 masks of `packed_rows`."""
        state = self.runner.state
        allowed = unpacked(packed, output.logits.shape[1]) if packed is not None else None
        rules = RowRules(allowed=allowed, settle=self.runner.ops.settle)
        if self._acceptance is not None:
            forced = self._acceptance(output.rows, draft, state.sampling.seeds).forced
            rules = replace(rules, forced=forced)
        thinking = self.thinking if needs.thinking else None
        result = accept(
            output.logits,
            output.rows,
            draft,
            state,
            logprobs=needs.logprobs,
            plan=needs.law,
            rules=rules,
            thinking=thinking,
        )
        self.drafters.observe(output.rows, output.forward, state)
        return result

    def packed_masks(
        self, plan: VerifyPlan, drafts: Sequence[Sequence[int]], needs: StepNeeds, num_rows: int
    ) -> Tensor:
        """Masks of the step's grammars on the host, see `packed_rows`. drafts: [S][K]."""
        needs.catch_up()
        if plan.row_budget is not None:
            plan = by_slot(cut_to_draft(plan, [sum(token >= 0 for token in window) for window in drafts]))
        return packed_rows(plan, drafts, needs.grammars, num_rows, self.runner.model.vocab_size)

    def prefill(self, plan: PrefillPlan) -> None:
        self.advance_prefill(self.begin_prefill(plan), self.runner.model.num_layers + 1)

    def begin_prefill(self, plan: PrefillPlan) -> Reading:
        return self.runner.begin_prefill(plan)

    def advance_prefill(self, reading: Reading, num_layers: int) -> bool:
        at_once, left = self.runner.model.num_layers, self.runner.model.num_layers - reading.num_done
        if left:
            reading.forward = self.runner.advance_prefill(reading, num_layers)
        if reading.forward is not None and (not left or num_layers > at_once):
            self.drafters.observe(reading.rows, reading.forward, self.runner.state)
            reading.seen = True
        return reading.seen
