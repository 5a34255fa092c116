"""The training loop: batches in, a drafter out, with measurements on held-out answers, checkpoints and resumption.

What happens at a step is a function of the plan, the seed and the step alone; the checkpoint holds parameters, moments
and the curve, so a run that was killed ends with the weights of one that was not. Memory is bounded by one batch.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localspec.storage.safetensors import SafetensorsFile, TensorItem, write_safetensors
from localspec.training.answers import AnswerStore, Batch, BatchPlan, epoch_batches
from localspec.training.drafting import Tally, TrainableDrafter, walk
from localspec.training.kept import KeptHiddens
from localspec.training.parts import set_rounding
from localspec.training.target import Hiddens, Target

STATE_FILE = "training.safetensors"
MEASURED_DEPTH = 4
CALIBRATION_STEPS, CALIBRATION_S = 36, 5.0
UNCOUNTED_STEPS = 2
"""Of a calibration: the first ones make room and choose kernels."""
BETAS = (0.9, 0.95)
CLIP = 1.0
SAVE_S, SAVE_SHARE = 20.0, 0.05
"""A checkpoint is written at least this often, however slow the steps are, unless writing takes more than its share."""
FITTED_SEQUENCES = 16
Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainPlan:
    """How to train. `rounding_from`: share of the steps after which matrices are rounded to NVFP4; None: never."""

    steps: int
    batches: BatchPlan
    learning_rate: float = 1e-3
    warm_up_share: float = 0.03
    floor_share: float = 0.03
    weight_decay: float = 0.01
    rounding_from: float | None = None
    measure_every: int = 200
    save_every: int = 200
    measured_sequences: int = 256
    depth: int = MEASURED_DEPTH

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine down to a floor."""
        warm = max(1, round(self.steps * self.warm_up_share))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (self.floor_share + (1 - self.floor_share) * (1 + math.cos(math.pi * share)) / 2)


@dataclass(frozen=True)
class Point:
    """One measurement. length: mean acceptance length on held-out answers; rates: of steps that accept draft k."""

    step: int
    loss: float
    length: float
    rates: tuple[float, ...]
    parts: dict[str, float] = field(default_factory=dict)


class Trainer:
    """One run, in a folder if it is to be gone on with."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        target: Target,
        store: AnswerStore,
        plan: TrainPlan,
        folder: Path | None,
        kept: KeptHiddens | None = None,
    ) -> None:
        """folder: takes the checkpoint, None writes nothing. kept: of this store, None to let the target read every
        batch. Raises ValueError if there is nothing to train on or to measure with."""
        self._kept = kept
        self.drafter, self.target, self.store, self.plan = drafter, target, store, plan
        self._state = None if folder is None else folder / STATE_FILE
        self._train, self.held_out = store.select(held_out=False), store.select(held_out=True, greedy=True)
        if not len(self._train) or not len(self.held_out):
            raise ValueError("the store needs answers to train on and held-out ones to measure with; add prompts")
        # The store has short prompts first: take them from everywhere.
        places = np.linspace(0, len(self.held_out) - 1, min(plan.measured_sequences, len(self.held_out)))
        self.held_out = self.held_out[places.round().astype(np.int64)]
        parameters = list(drafter.module.parameters())
        groups = [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": plan.weight_decay},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        on_card = target.device.type == "cuda"
        self._optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=BETAS, fused=on_card)
        self._epoch: tuple[int, list[list[int]]] | None = None
        self._epoch_sizes: list[int] = []
        drafter.fit_inputs(self._examples())
        self.step, self.curve = 0, list[Point]()

    def run(self, report: Report) -> list[Point]:
        """Train to the end, from the checkpoint if there is one. Returns the curve."""
        self._restore()
        recent: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        started = saved = time.monotonic()
        wait_s = SAVE_S
        while self.step < self.plan.steps:
            self._set_rounding(self.step)
            rate = self.plan.rate(self.step)
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            loss, parts = self._backward(self.step)
            torch.nn.utils.clip_grad_norm_(self.drafter.module.parameters(), CLIP)
            self._optimiser.step()
            # Also what is measured next reads the new weights.
            self._set_rounding(self.step)
            recent.append(loss)
            self.step += 1
            last = self.step == self.plan.steps
            if self.step % self.plan.measure_every == 0 or last:
                point = self._point(recent, parts)
                recent = []
                self.curve.append(point)
                report(f"{told(point, self.plan.steps)} {time.monotonic() - started:.0f} s")
            if self.step % self.plan.save_every == 0 or last or time.monotonic() - saved > wait_s:
                begun = time.monotonic()
                self.save()
                saved = time.monotonic()
                wait_s = max(SAVE_S, (saved - begun) / SAVE_SHARE)
        self._set_rounding(self.plan.steps)
        return self.curve

    @property
    def steps_an_epoch(self) -> int:
        """Batches of one pass through the answers."""
        return len(epoch_batches(self.store, self._train, self.plan.batches, 0))

    def seconds_a_step(self) -> float:
        """Time of one step, from a few whose gradients are thrown away."""
        times: list[float] = []
        for step in range(CALIBRATION_STEPS):
            begun = time.perf_counter()
            float(self._backward(step)[0])
            if step >= UNCOUNTED_STEPS:
                times.append(time.perf_counter() - begun)
            if len(times) > 1 and sum(times) > CALIBRATION_S:
                break
        self._optimiser.zero_grad(set_to_none=True)
        return float(np.median(times))

    @torch.no_grad()
    def measure(
        self, entries: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]], store: AnswerStore | None = None
    ) -> Tally:
        """Greedy acceptance over answers, of another store than the one that is trained on if one is given."""
        store = store or self.store
        tally = Tally()
        plan = BatchPlan(self.plan.batches.tokens_per_batch // 2, self.plan.batches.max_tokens, 0)
        for batch_entries in epoch_batches(store, np.asarray(entries), plan, 0):
            batch = store.batch(batch_entries, plan.max_tokens, self.target.device)
            with self._autocast():
                hiddens = self.target.hiddens(batch.tokens, self.drafter.layer_outputs)
                walk(self.drafter.matches(batch, hiddens, self.plan.depth), batch, tally)
        return tally

    def save(self) -> None:
        """Write the checkpoint, if there is a folder; it appears whole or not at all."""
        if self._state is None:
            return
        self._state.parent.mkdir(parents=True, exist_ok=True)
        items: list[TensorItem] = []
        for name, parameter in self.drafter.module.named_parameters():
            moments = self._optimiser.state.get(parameter, {})
            zeros = torch.zeros_like(parameter)
            for part, tensor in (
                ("value", parameter.detach()),
                ("exp_avg", moments.get("exp_avg", zeros)),
                ("exp_avg_sq", moments.get("exp_avg_sq", zeros)),
            ):
                array = tensor.float().cpu().contiguous().numpy()
                items.append((f"{name}/{part}", "F32", tuple(array.shape), array.reshape(-1).view(np.uint8)))
        curve = json.dumps([asdict(point) for point in self.curve])
        write_safetensors(self._state, items, {"step": str(self.step), "curve": curve, "plan": self._key()})

    def begun_steps(self) -> int:
        """Steps in all of the training whose checkpoint lies in the folder; 0 if there is none.

        Raises ValueError for a checkpoint of another training.
        """
        path = self._state
        if path is None or not path.is_file():
            return 0
        with SafetensorsFile.open(path) as file:
            key = file.metadata.get("plan", "")
        found = re.search(r'"steps": (\d{1,12})[,}]', key)
        steps = int(found[1]) if found else 0
        if not steps or key != self._key(steps):
            raise ValueError(f"{path} belongs to another training; take another folder or delete it")
        return steps

    def _restore(self) -> None:
        path = self._state
        if path is None or not path.is_file():
            return
        with SafetensorsFile.open(path) as file:
            if file.metadata.get("plan") != self._key():
                raise ValueError(f"{path} belongs to another training; take another folder or delete it")
            self.step = int(file.metadata["step"])
            self.curve = [_point_of(each) for each in json.loads(file.metadata["curve"])]
            for name, parameter in self.drafter.module.named_parameters():
                read = {part: _tensor(file, f"{name}/{part}") for part in ("value", "exp_avg", "exp_avg_sq")}
                with torch.no_grad():
                    parameter.copy_(read["value"])
                state = {part: read[part].to(parameter.device) for part in ("exp_avg", "exp_avg_sq")}
                counted = torch.tensor(float(self.step), device=parameter.device if self._fused else "cpu")
                self._optimiser.state[parameter] = {"step": counted, **state}

    @property
    def _fused(self) -> bool:
        return self.target.device.type == "cuda"

    def _key(self, steps: int = 0) -> str:
        """What must agree for a checkpoint to be gone on with. steps: other than the plan's."""
        plan = asdict(replace(self.plan, steps=steps or self.plan.steps))
        config = {"plan": plan, "drafter": self.drafter.config, "sequences": len(self._train)}
        return json.dumps(config, sort_keys=True)

    def _backward(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        entries = self._entries(step)
        generator = torch.Generator().manual_seed(self.plan.batches.seed * 1_000_003 + step)
        self._optimiser.zero_grad(set_to_none=True)
        with self._autocast():
            batch, hiddens = self._read(entries)
            loss = self.drafter.loss(batch, hiddens, generator)
        loss.value.backward()  # type: ignore[no-untyped-call]
        return loss.value.detach(), dict(loss.parts)

    def _read(self, entries: list[int]) -> tuple[Batch, Hiddens]:
        if self._kept is not None:
            return self._kept.batch(entries, self.drafter.layer_outputs)
        batch = self.store.batch(entries, self.plan.batches.max_tokens, self.target.device)
        return batch, self.target.hiddens(batch.tokens, self.drafter.layer_outputs)

    def _examples(self) -> Hiddens:
        """Of the first few training answers."""
        batch = self.store.batch(self._train[:FITTED_SEQUENCES], self.plan.batches.max_tokens, self.target.device)
        return self.target.hiddens(batch.tokens, self.drafter.layer_outputs)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, dtype=torch.bfloat16, enabled=self._fused)

    def _entries(self, step: int) -> list[int]:
        """Entries of a step's batch; epochs differ in their number of batches."""
        epoch = 0
        while True:
            if epoch == len(self._epoch_sizes):
                self._epoch_sizes.append(len(self._batches(epoch)))
            if step < self._epoch_sizes[epoch]:
                return self._batches(epoch)[step]
            step -= self._epoch_sizes[epoch]
            epoch += 1

    def _batches(self, epoch: int) -> list[list[int]]:
        """Of one epoch; only the last one asked for is kept, since a small store is read hundreds of times."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, epoch_batches(self.store, self._train, self.plan.batches, epoch)
        return self._epoch[1]

    def _set_rounding(self, step: int) -> None:
        begin = self.plan.rounding_from
        set_rounding(self.drafter.module, begin is not None and step >= begin * self.plan.steps)

    def _point(self, recent: list[Tensor], parts: dict[str, Tensor]) -> Point:
        tally = self.measure(self.held_out)
        return Point(
            step=self.step,
            loss=round(float(torch.stack(recent).mean()), 4),
            length=round(tally.length, 4),
            rates=tuple(tally.per_position),
            parts={name: round(float(part), 4) for name, part in parts.items()},
        )


def told(point: Point, steps: int) -> str:
    """A line for people."""
    rates = " ".join(f"{rate:.2f}" for rate in point.rates)
    return f"step {point.step}/{steps}: loss {point.loss:.3f}, acceptance length {point.length:.2f} ({rates})"


def _point_of(found: dict[str, Any]) -> Point:
    return Point(found["step"], found["loss"], found["length"], tuple(found["rates"]), dict(found["parts"]))


def _tensor(file: SafetensorsFile, name: str) -> Tensor:
    array = np.frombuffer(file.tensor_bytes(name), dtype=np.float32).copy()
    return torch.from_numpy(array).view(file.entry(name).shape)
