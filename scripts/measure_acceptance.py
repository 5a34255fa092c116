"""Acceptance lengths of the demo's drafters by depth and kind of work, without an engine: exact walks over answers.

The target writes its greedy answers in batches; where a draft chain is right, what it reads is the answer itself, so
every draft at every place can be judged at once (localspec/training/drafting.py). Gives the same figures as an engine
that drafts greedily, at a fraction of its time; rates are `measure_matrix.py`'s matter.

    python scripts/measure_acceptance.py --model DIR --data ../shared/data --prompts 12
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from measure_matrix import KINDS, TRAINED, prompt_sets, pruned_model
from torch import Tensor

from localspec.api.types import GenerateRequest
from localspec.engine.text import TextStage
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.matrix.prompts import Prompt as BenchPrompt
from localspec.training.answers import AnswerStore, Batch, BatchPlan, epoch_batches
from localspec.training.drafting import Tally, TrainableDrafter, walk
from localspec.training.loading import load_drafter
from localspec.training.target import DenseTarget
from localspec.training.writing import Prompt, WritingLimits, write_answers

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (1, 2, 3, 4, 5, 6, 7)
PRUNED = "draft_model (same model, pruned)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--drafters", type=Path, default=ROOT / "localspec/data/drafters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=12, help="Of each kind of work.")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--kinds", default=",".join(KINDS), help="Comma-separated kinds of work.")
    parser.add_argument("--methods", default=",".join((*TRAINED, PRUNED)))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device, kinds = torch.device(chosen.device), chosen.kinds.split(",")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = DenseTarget(read_config(chosen.model), open_checkpoint(chosen.model), device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        store = AnswerStore(Path(folder) / "answers")
        sets = {kind: found for kind, found in prompt_sets(chosen.data, chosen.prompts).items() if kind in kinds}
        measured_answers(chosen.model, target, sets, chosen.max_tokens, store)
        print(f"{len(store)} answers", flush=True)
        pruned = pruned_model(chosen.model, Path(folder) / "pruned")
        small = DenseTarget(read_config(pruned), open_checkpoint(pruned), device, dtype)
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name in chosen.methods.split(","):
            drafter = (
                None
                if name == PRUNED
                else load_drafter(name, chosen.drafters / f"{chosen.model.name}.{name}", target)[0]
            )
            found[name] = {}
            for index, kind in enumerate(sets):
                found[name][kind] = lengths(store, index, target, drafter or small)
            print(name, json.dumps(found[name]), flush=True)
    document = {
        "device": chosen.device,
        "prompts_a_kind": chosen.prompts,
        "max_tokens": chosen.max_tokens,
        "length_by_drafter_kind_depth": found,
    }
    out = chosen.out or ROOT / f"scripts/results/acceptance_{device.type}.json"
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measured_answers(
    folder: Path, target: DenseTarget, sets: Mapping[str, Sequence[BenchPrompt]], max_tokens: int, store: AnswerStore
) -> None:
    """Greedy answers of the model of a folder; the kind of an answer is the place of its set."""
    text = TextStage(folder, 1 << 20)
    prompts = [
        Prompt(text.prepare(GenerateRequest(messages=each.messages)).request.prompt_ids, True, index)
        for index, found in enumerate(sets.values())
        for each in found
    ]
    on_card = target.device.type == "cuda"
    limits = WritingLimits(max_tokens, 1 << 20 if on_card else 1 << 14, 2048 if on_card else 24)
    write_answers(target, prompts, tuple(text.stop_ids), limits, store.append)


@torch.no_grad()
def lengths(
    store: AnswerStore, kind: int, target: DenseTarget, drafter: TrainableDrafter | DenseTarget
) -> dict[str, float]:
    """Depth -> mean tokens a step."""
    tallies = {depth: Tally() for depth in DEPTHS}
    on_card = target.device.type == "cuda"
    plan = BatchPlan(1 << 14 if on_card else 1 << 10, 4096, 0)
    for entries in epoch_batches(store, store.select(True, kind=kind), plan, 0):
        batch = store.batch(entries, plan.max_tokens, target.device)
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=on_card):
            if isinstance(drafter, DenseTarget):
                matches = next_token_matches(drafter, batch, max(DEPTHS))
            else:
                hiddens = target.hiddens(batch.tokens, drafter.layer_outputs)
                matches = drafter.matches(batch, hiddens, max(DEPTHS))
        for depth, tally in tallies.items():
            walk(matches[:, :, :depth], batch, tally)
    return {str(depth): round(tally.length, 3) for depth, tally in tallies.items()}


def next_token_matches(model: DenseTarget, batch: Batch, depth: int) -> Tensor:
    """[B, T, depth] bool: a model of the same vocabulary that reads the answer says its next tokens."""
    final = model.hiddens(batch.tokens, ()).final
    said = (final @ model.head_rows(None).T).argmax(dim=-1)
    right = said[:, :-1] == batch.tokens[:, 1:]
    found = torch.zeros(*batch.tokens.shape, depth, dtype=torch.bool, device=final.device)
    for step in range(depth):
        found[:, : right.shape[1] - step, step] = right[:, step:]
    return found


if __name__ == "__main__":
    main()
