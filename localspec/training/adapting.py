"""Fine-tunes a drafter on what a user's model wrote lately, and says whether it drafts better for it.

The judge is acceptance on conversations that were kept back; a drafter that does not rise there is given up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from localspec.training.answers import AnswerStore, BatchPlan
from localspec.training.drafting import TrainableDrafter
from localspec.training.export import Form
from localspec.training.loading import load_drafter
from localspec.training.parts import set_rounding
from localspec.training.target import Target
from localspec.training.trainer import Report, Trainer, TrainPlan

LEAST_STEPS = 4


@dataclass(frozen=True)
class AdaptSettings:
    """steps 0: as many as fit into the seconds, at most `epochs` times through the answers."""

    seconds: float = 120.0
    steps: int = 0
    epochs: int = 4
    learning_rate: float = 2e-4
    tokens_per_batch: int = 4096
    max_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class Adapted:
    """before, after: acceptance lengths on kept-back answers. `better`: whether the drafter is to be kept."""

    drafter: TrainableDrafter
    form: Form
    before: float
    after: float
    steps: int

    @property
    def better(self) -> bool:
        return self.after > self.before


def adapt_drafter(
    kind: str, folder: Path, target: Target, store: AnswerStore, settings: AdaptSettings, report: Report
) -> Adapted:
    """Fine-tune the drafter of a folder in memory; nothing is written.

    Raises ValueError where there is nothing to train on or to measure with, or the drafter cannot be trained further.
    """
    drafter, form = load_drafter(kind, folder, target)
    plan = TrainPlan(
        steps=settings.steps,
        batches=BatchPlan(settings.tokens_per_batch, settings.max_tokens, settings.seed),
        learning_rate=settings.learning_rate,
        warm_up_share=0.1,
        rounding_from=0.0 if form == "nvfp4" else None,
        measure_every=1 << 30,
    )
    trainer = Trainer(drafter, target, store, plan, None)
    # What is stored is what is measured and trained.
    set_rounding(drafter.module, form == "nvfp4")
    before = trainer.measure(trainer.held_out).length
    report(f"acceptance length {before:.3f} before")
    if not settings.steps:
        fitting = int(settings.seconds / trainer.seconds_a_step())
        trainer.plan = replace(plan, steps=max(LEAST_STEPS, min(fitting, settings.epochs * trainer.steps_an_epoch)))
    curve = trainer.run(report)
    return Adapted(drafter, form, before, curve[-1].length, trainer.plan.steps)
