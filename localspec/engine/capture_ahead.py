"""Captures steps before an answer needs them, while nobody asks for anything, and tells the tuner what they take.

A step that comes up for the first time holds its answer up for as long as dozens of steps take, and a tuner that tries
methods and depths makes many come up. So every choice of a single sequence is captured ahead, for what the last
requests asked of their steps and for what most ask. The steps run on a page that keeps nothing, in a slot that nobody
holds. Several sequences, grammars and rare laws are captured when they come up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from localspec.api.types import Sampling
from localspec.core.records import Request, SlotPlan, VerifyPlan
from localspec.engine.device_step import DeviceStep, StepNeeds
from localspec.engine.drafting import DrafterSet
from localspec.engine.inbox import Action
from localspec.engine.step import run_verify
from localspec.engine.step_costs import Arm
from localspec.engine.tuner import Tuner
from localspec.runner.runner import Runner
from localspec.sampling.processors import ProcessorPlan

log = logging.getLogger(__name__)
SEQUENCE_ID = 1 << 41
LENGTH_TOKENS = 1024
"""Of the sequence that is stepped: as long as a chat is, so that the times are those of its steps."""
ROOM_TOKENS = 256
"""For the tokens that the steps of one choice write."""
SPARE_GRAPHS, GRAPHS_OF_A_STEP = 16, 2
"""Room that is kept for steps that were not foreseen; drafts and the rest of a step are one each."""
QUIET_S = 0.5
"""Nobody has asked for anything for so long before steps are captured."""
STEPS = 3
"""Of a choice; the first captures, the last is timed."""
USUAL_LAWS = (Sampling(temperature=0.8, top_k=20, top_p=0.95), Sampling())


@runtime_checkable
class CapturingStep(DeviceStep, Protocol):
    """A device step that captures; see `GraphStep`."""

    def spare_graphs(self) -> int:
        """How many can be captured before others are given up."""
        ...

    def is_captured(self, plan: VerifyPlan, needs: StepNeeds) -> bool:
        """Whether such a step is, both parts of it."""
        ...

    def wait(self) -> None:
        """Until the device has done all it was given."""
        ...


class CaptureAhead:
    """Used by the decode thread, between two requests only."""

    def __init__(self, runner: Runner, drafters: DrafterSet, device: CapturingStep, tuner: Tuner, limit: int) -> None:
        """limit: tokens of the context."""
        self._runner, self._drafters, self._device, self._tuner = runner, drafters, device, tuner
        self._length = max(1, min(LENGTH_TOKENS, limit - ROOM_TOKENS))
        vocab_size = runner.model.vocab_size
        self._usual = tuple(StepNeeds(ProcessorPlan.for_requests([law], vocab_size)) for law in USUAL_LAWS)
        self._last: tuple[StepNeeds, int] | None = None
        self._failed = False

    def see(self, plan: VerifyPlan, needs: StepNeeds) -> None:
        """A step of a request: what it asked for is captured for the other choices too."""
        if len(plan.slots) == 1 and not needs.grammars:
            self._last = needs, plan.slots[0].length_bound_tokens

    def work_until(self, arrived: Callable[[float | None], Action | None]) -> Action | None:
        """Wait for something to arrive, and capture meanwhile, one step between two looks. arrived: `Inbox.next`."""
        patience_s = QUIET_S
        while (found := arrived(patience_s)) is None:
            patience_s = 0.0
            if not self.run_one():
                return arrived(None)
        return found

    def run_one(self, usual: bool = True) -> bool:
        """Capture and time a step that is not captured yet. False where there is none, or no room for one. usual: also
        of laws that most ask for; without, only as the last request asked, if there was one."""
        if self._failed or self._device.spare_graphs() < SPARE_GRAPHS + GRAPHS_OF_A_STEP:
            return False
        for arm, plan, needs in self._wanted(usual):
            if not self._device.is_captured(plan, needs):
                self._run(arm, plan, needs)
                return True
        return False

    def _wanted(self, usual: bool) -> Iterator[tuple[Arm, VerifyPlan, StepNeeds]]:
        kinds: list[tuple[StepNeeds, int]] = []
        if self._last is not None:
            last, bound = self._last
            kinds.append((StepNeeds(last.law, last.logprobs, last.thinking), max(bound, self._length)))
        if usual or not kinds:
            kinds += [(needs, self._length) for needs in self._usual]
        for needs, bound in kinds:
            for arm in self._tuner.foreseen():
                yield arm, VerifyPlan((SlotPlan(0, SEQUENCE_ID, *arm, bound),)), needs

    def _run(self, arm: Arm, plan: VerifyPlan, needs: StepNeeds) -> None:
        request = Request("", (0,) * self._length, Sampling(), 0, 1 << 20, ())
        try:
            self._runner.admit(0, request, [0], None)
            self._device.admit(0, request)
            self._drafters.admit(0, request)
            clocks = [run_verify(plan, self._device, needs, waits=False).clock for _ in range(STEPS)]
            self._device.wait()
            self._tuner.known.see_ahead(arm, plan.graph_key.num_rows, *clocks[-1].intervals_ms())
        except Exception:
            # A step that cannot run fails its request when one asks for it, and says why; until then nobody is hurt.
            log.exception("a step could not be captured ahead; from now on steps are captured when they come up")
            self._failed = True
        finally:
            self._runner.release(0)
            self._runner.pool.reset_states(0)
