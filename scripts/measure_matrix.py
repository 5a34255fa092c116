"""The matrix on real data: methods x depths x kinds of work on prompts that no drafter was trained on, real weights.

Prompts come from the prompt sets (`--data`), evenly spread over each kind of work; "off" is the control of every cell.
Two more drafts stand beside the trained ones: the target itself with layers left out, and a model with another
vocabulary (`--foreign`). Writes docs/matrix.md and a JSON document, cell by cell. Methods take turns prompt
by prompt, so that what else the machine does meets them alike; the tuner begins each kind of work with nothing learnt
and learns from its own answers only. Over a few hundred tokens it mostly still listens: take 500 or more of each kind.

    python scripts/measure_matrix.py --home $LOCALSPEC_HOME --data ../shared/data --device cpu --prompts 6
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.matrix.bench import BenchPlan, Cell, run_bench
from localspec.matrix.prompts import Prompt
from localspec.matrix.table import markdown
from localspec.storage.safetensors import write_safetensors

ROOT = Path(__file__).resolve().parents[1]
MODEL_ID = "smollm2-135m"
TRAINED = ("eagle3", "mtp", "dspark", "dflash")
KINDS = {
    "chat": ("writing", "roleplay", "reasoning", "extraction", "stem", "humanities"),
    "code": ("coding",),
    "maths": ("math", "math_reasoning"),
    "summary": ("summarization",),
    "qa": ("qa",),
    "retrieval": ("rag",),
}
KEPT_LAYERS = (0, 1, 2, 6, 7, 8, 9, 10, 11, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 27, 28, 29)
"""Of the pruned draft: at each of eight times the layer left out without which most next tokens stayed as they were."""


def prompt_sets(data: Path, count: int) -> dict[str, tuple[Prompt, ...]]:
    """`count` prompts of each kind of work, evenly spread over its set."""
    texts: dict[str, list[str]] = defaultdict(list)
    with gzip.open(data / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        texts["code"] += [json.loads(line)["prompt"] for line in file]
    for line in (data / "gsm8k_test_400.jsonl").read_text(encoding="utf-8").splitlines():
        texts["maths"].append(json.loads(line)["question"])
    for line in (data / "spec_bench_320.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kind = next((kind for kind, names in KINDS.items() if row["category"] in names), None)
        if kind is not None:
            texts[kind].append(row["turns"][0])
    return {kind: tuple(Prompt.of(text) for text in _spread(texts[kind], count)) for kind in KINDS}


def _spread(texts: list[str], count: int) -> list[str]:
    count = min(count, len(texts))
    return [texts[place * len(texts) // count] for place in range(count)]


def pruned_model(source: Path, folder: Path) -> Path:
    """The target with layers left out, in BF16."""
    config = read_config(source)
    checkpoint = open_checkpoint(source)
    folder.mkdir(parents=True)
    items = []
    names = sorted({name.split(".weight")[0] + ".weight" for name in checkpoint.names()})
    for name in names:
        parts = name.split(".")
        target = name
        if parts[1] == "layers":
            if int(parts[2]) not in KEPT_LAYERS:
                continue
            target = ".".join([*parts[:2], str(KEPT_LAYERS.index(int(parts[2]))), *parts[3:]])
        stored = checkpoint.vector(name) if "norm" in name else checkpoint.weight(name).dequantise()
        tensor = stored.bfloat16().contiguous()
        items.append((target, "BF16", tuple(tensor.shape), tensor.view(-1).view(_bytes()).numpy()))
    write_safetensors(folder / "model.safetensors", items)
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(KEPT_LAYERS)}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder


def _bytes() -> Any:
    import torch

    return torch.uint8


async def measure(chosen: argparse.Namespace) -> None:
    """Every cell; each extra draft model gets an engine of its own, and its cells its own name."""
    prompts = prompt_sets(chosen.data, chosen.prompts)
    prompts = {kind: found for kind, found in prompts.items() if kind in chosen.workloads.split(",")}
    model = chosen.home / "models" / MODEL_ID
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        extra: dict[str, Path | None] = {"": None, "same model, pruned": pruned_model(model, Path(folder) / "pruned")}
        if chosen.foreign is not None:
            extra[f"foreign vocabulary, {read_config(chosen.foreign)['model_type']}"] = chosen.foreign.resolve()
        for label, draft in extra.items():
            drafters = Path(folder) / (label or "trained")
            drafters.mkdir()
            if draft is None:
                for name in (f"{MODEL_ID}.{kind}" for kind in TRAINED):
                    if (chosen.drafters / name / "model.safetensors").is_file():
                        (drafters / name).symlink_to(chosen.drafters.resolve() / name)
                fixed = [("ngram", 4), *((kind, depth) for kind in TRAINED for depth in chosen.depths)]
                # Last in the first turn: on a card the fixed ones have captured their steps by then.
                methods = [*fixed, ("auto", 0)]
            else:
                (drafters / f"{MODEL_ID}.draft_model").symlink_to(draft)
                methods = [("draft_model", 4)]
            place = ModelPlace(MODEL_ID, model, MODEL_ID)
            engine = LocalEngine(
                lambda name, report, place=place: place,
                EngineOptions(chosen.device, 2048, drafters_dir=drafters, ngram_learn=False),
            )
            engine.start(MODEL_ID)
            info = await engine.wait_ready()
            known = tuple(method for method in methods if method[0] in info.drafters)
            # The extra drafts are slow; what they show is their acceptance.
            asked = prompts if not label else {kind: some[: chosen.extra_prompts] for kind, some in prompts.items()}
            plan = BenchPlan(
                asked, known, (1,), chosen.max_tokens,
                cold=True, in_turns=True, rehearsals=int(chosen.device != "cpu"),
            )  # fmt: skip
            begun = time.monotonic()

            def take(cell: Cell, label: str = label) -> None:
                print(cell, flush=True)
                if not label or cell.drafter != "off":
                    cells.append(_renamed(cell, label))
                    # What is measured so far stands, whatever ends the run.
                    write(chosen, cells)

            try:
                await run_bench(engine, plan, take)
            finally:
                await engine.aclose()
            print(f"{label or 'trained'}: {time.monotonic() - begun:.0f} s", flush=True)


def _renamed(cell: Cell, label: str) -> Cell:
    return dataclasses.replace(cell, drafter=f"draft_model ({label})") if label else cell


def write(chosen: argparse.Namespace, cells: list[Cell]) -> None:
    kinds, methods = list(KINDS), ["off", "ngram", *TRAINED, "auto"]

    def place(cell: Cell) -> tuple[int, int, int]:
        known = methods.index(cell.drafter) if cell.drafter in methods else len(methods)
        return kinds.index(cell.workload), known, cell.depth

    cells = sorted(cells, key=place)
    document = {
        "model": MODEL_ID,
        "device": chosen.device,
        "note": chosen.note,
        "prompts": chosen.prompts,
        "max_tokens": chosen.max_tokens,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_page(chosen)


def write_page(chosen: argparse.Namespace) -> None:
    """From everything that was measured and lies beside the JSON document."""
    documents = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(chosen.json.parent.glob("matrix_*.json"))
    ]
    parts = [HEAD, walked(chosen.json.parent)]
    for each in documents:
        note = f" ({each['note']})" if each["note"] else ""
        size = f"{each['prompts']} prompts a kind, {each['max_tokens']} tokens each"
        parts.append(f"## On {each['device']}{note}: {size}\n")
        cells = [Cell(**{**cell, "per_position": tuple(cell["per_position"])}) for cell in each["cells"]]
        parts += [markdown(cells), "\n" + against_fixed(cells)]
    chosen.out.write_text("\n".join(parts) + "\n", encoding="utf-8")


HEAD = """# Drafting on real data

SmolLM2 135M Instruct (the demo) with its own trained drafters, greedy. Prompts: HumanEval, GSM8K test and Spec-Bench;
none was trained on. Made by `scripts/measure_acceptance.py` (exact walks over the target's answers) and
`scripts/measure_matrix.py` (the engine); the drafters by `scripts/train_demo_drafters.py`. `length` is tokens a step
(1 = plain decoding), `per position` the share of steps that accept draft 1, 2, ...; `differ` counts tokens that are not
those of plain decoding.
"""


def against_fixed(cells: list[Cell]) -> str:
    """The tuner, which began each kind of work with nothing learnt, beside the best fixed method and depth."""
    lines = ["| workload | tuner, cold | best fixed | | share |", "| --- | ---: | ---: | --- | ---: |"]
    for kind in KINDS:
        tuned = [cell for cell in cells if cell.workload == kind and cell.drafter == "auto"]
        fixed = [cell for cell in cells if cell.workload == kind and cell.drafter != "auto"]
        if tuned and fixed:
            best = max(fixed, key=lambda cell: cell.tok_per_s)
            share = tuned[0].tok_per_s / best.tok_per_s
            what = f"{best.drafter} {best.depth or ''}".strip()
            lines.append(f"| {kind} | {tuned[0].tok_per_s:.1f} | {best.tok_per_s:.1f} | {what} | {share:.3f} |")
    return "\n".join(lines) + "\n"


def walked(folder: Path) -> str:
    """Acceptance by depth, from what `measure_acceptance.py` left in the folder."""
    lines: list[str] = []
    for path in sorted(folder.glob("acceptance_*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["length_by_drafter_kind_depth"]
        kinds = list(next(iter(found.values())))
        size = f"{document['prompts_a_kind']} prompts a kind, first {document['max_tokens']} tokens of each answer"
        lines.append(f"## Acceptance length by depth ({document['device']}, {size})\n")
        lines.append("| drafter | depth | " + " | ".join(kinds) + " |")
        lines.append("| --- | ---: |" + " ---: |" * len(kinds))
        for drafter, depth in ((each, depth) for each in found for depth in ("2", "4", "7")):
            values = " | ".join(f"{found[drafter][kind][depth]:.2f}" for kind in kinds)
            lines.append(f"| {drafter} | {depth} | {values} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, help="LOCALSPEC_HOME with the demo installed; without it only the page.")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--drafters", type=Path, default=ROOT / "localspec/data/drafters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=8, help="Of each kind of work.")
    parser.add_argument("--extra-prompts", type=int, default=1, help="Of each kind, for the two slow extra drafts.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 7])
    parser.add_argument("--workloads", default=",".join(KINDS))
    parser.add_argument("--foreign", type=Path, help="Folder of a small model with another vocabulary.")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/matrix.md")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    chosen.json = chosen.json or ROOT / f"scripts/results/matrix_{chosen.device}.json"
    if chosen.home is None:
        write_page(chosen)
    else:
        asyncio.run(measure(chosen))


if __name__ == "__main__":
    main()
