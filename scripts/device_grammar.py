#!/usr/bin/env python3
"""What a grammar costs a step on a card: the 27B's shapes, random weights, without drafts and with seven of them.

Three answers to one prompt: free, a list of texts (what a permissive schema comes to: nearly everything may follow) and
a list of objects with numbers, choices and short texts (masks change with every token). Each runs first without drafts;
its own words are then the prediction of the drafted runs, so that every step has its full width and every row needs a
mask. Runs are interleaved, and a step takes what the clock on the wall says: a card that waits for the host counts.
Free runs against each other are the control. Needs llguidance on the import path; the tokenizer is made up, of the real
one's size.

    python scripts/device_grammar.py                  # less than 90 s on an H200
    python scripts/device_grammar.py --tiny           # any machine: whether it runs, not what it costs

Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from localspec.api.types import Grammar, Sampling  # noqa: E402
from localspec.core.records import MAX_SLOTS, Request  # noqa: E402
from localspec.drafters import DrafterSetup, drafter_module  # noqa: E402
from localspec.engine.build import EngineOptions, assemble  # noqa: E402
from localspec.engine.loop import EndNews, StepNews  # noqa: E402
from localspec.kernels.table import choose  # noqa: E402
from localspec.models import architecture  # noqa: E402
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint  # noqa: E402
from localspec.sampling.grammar import GrammarCompiler  # noqa: E402

DEPTH = 7
BAR = 0.03
LIMIT_TOKENS = 4096
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["file", "folder", "link"]},
        "open": {"type": "boolean"},
    },
    "required": ["name", "size", "kind", "open"],
    "additionalProperties": False,
}
GRAMMARS = {
    "free": None,
    "texts": Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 1})),
    "objects": Grammar("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 80})),
}


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, wall milliseconds a step, tokens a step, host milliseconds a step making masks."""

    token_ids: tuple[int, ...]
    step_ms: float
    tokens_per_step: float
    mask_ms: float


def write_tokenizer(path: Path, size: int) -> None:
    """A byte-level tokenizer of `size` ids: the 256 bytes, words of syllables, and an end token last."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = [chr(byte) for byte in printable] + [chr(256 + index) for index, _ in enumerate(others)]
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnpqrstvwxz", "aeiou")]
    words = (
        space + "".join(parts)
        for count in (1, 2, 3)
        for space in ("\u0120", "")
        for parts in itertools.product(syllables, repeat=count)
    )
    pieces = [*alphabet, *itertools.islice(words, size - 257)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": size - 1, "content": "<|end|>", "special": True, "normalized": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    path.write_text(json.dumps(document))


class Bench:
    """A running engine around a random model, and the grammars of its tokenizer."""

    def __init__(self, config: dict[str, Any], device: str, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        ops, _ = choose(device)
        text = config["text_config"]
        self._prompt = tuple((31 * index + (index // 40) % 7) % min(30000, text["vocab_size"]) for index in range(512))
        with torch.inference_mode():
            model = architecture("qwen3_5").load(config, SyntheticCheckpoint(config, torch.device(device)), ops)
        setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT_TOKENS)
        drafters = {"ngram": drafter_module("ngram").build(setup)}
        self._loop = assemble(model, ops, LIMIT_TOKENS, drafters, EngineOptions(device=device)).loop
        self._end = text["vocab_size"] - 1
        path = Path(tempfile.mkdtemp()) / "tokenizer.json"
        write_tokenizer(path, text["vocab_size"])
        self._compiler = GrammarCompiler(path, (self._end,))
        self._loop.start()

    def close(self) -> None:
        self._loop.stop()

    def run(self, grammar: Grammar | None, prediction: tuple[int, ...] = ()) -> Run:
        """Without drafts, or with a prediction as many as DEPTH of them."""
        request = Request(
            "",
            self._prompt,
            Sampling(),
            1,
            self.num_tokens,
            (self._end,),
            drafter="ngram" if prediction else "off",
            depth=DEPTH if prediction else None,
            prediction_ids=prediction,
            grammar=grammar,
        )
        matcher = self._compiler.compile(grammar) if grammar is not None else None
        mask_s = [0.0]
        if matcher is not None:
            make = matcher.window_masks

            def timed(drafts: Any) -> Any:
                began = time.perf_counter()
                masks = make(drafts)
                mask_s[0] += time.perf_counter() - began
                return masks

            matcher.window_masks = timed  # type: ignore[method-assign]
        token_ids: list[int] = []
        times: list[float] = []
        ended = threading.Event()
        failures: list[str] = []

        def sink(news: object) -> None:
            if isinstance(news, StepNews):
                times.append(time.perf_counter())
                token_ids.extend(news.result.token_ids)
            elif isinstance(news, EndNews):
                failures.extend([news.error.message] if news.error is not None else [])
                ended.set()

        self._loop.submit(request, sink, matcher)
        if not ended.wait(120) or failures or len(times) < 3:
            raise RuntimeError(f"an answer failed: {failures or 'it did not end or was too short'}")
        steps = len(times) - 1
        step_ms = (times[-1] - times[0]) * 1e3 / steps
        return Run(tuple(token_ids), step_ms, len(token_ids) / (steps + 1), mask_s[0] * 1e3 / (steps + 1))


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Medians of interleaved runs, by drafting and by grammar."""
    report: dict[str, Any] = {}
    plain = {name: bench.run(grammar) for name, grammar in GRAMMARS.items()}  # graphs are captured here
    for mode in ("off", f"ngram_{DEPTH}"):
        predictions = {name: () if mode == "off" else run.token_ids for name, run in plain.items()}
        if mode != "off":
            for name, grammar in GRAMMARS.items():
                bench.run(grammar, predictions[name])
        runs: dict[str, list[Run]] = {name: [] for name in GRAMMARS}
        for _ in range(repeats):
            for name, grammar in GRAMMARS.items():
                runs[name].append(bench.run(grammar, predictions[name]))
        for name, found in runs.items():
            if any(run.token_ids != plain[name].token_ids for run in found):
                raise RuntimeError(f"{mode} {name}: drafting changed the answer")
        report[mode] = _table(mode, runs)
    return report


def _table(mode: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    free = [run.step_ms for run in runs["free"]]
    table: dict[str, Any] = {"control_spread": max(free) / min(free) - 1}
    for name, found in runs.items():
        step_ms = statistics.median(run.step_ms for run in found)
        table[name] = {
            "step_ms": step_ms,
            "tokens_per_step": statistics.median(run.tokens_per_step for run in found),
            "mask_ms": statistics.median(run.mask_ms for run in found),
            "cost": step_ms / statistics.median(free) - 1,
        }
        figures = "  ".join(f"{key} {value:.4f}" for key, value in table[name].items())
        print(f"{mode:>8} {name:<8} {figures}", file=sys.stderr, flush=True)
    return table


def main() -> int:
    """Parse, measure, say whether the bar holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--tokens", type=int, default=480, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    config = json.loads(json.dumps(architecture("qwen3_5").tiny_config() if options.tiny else QWEN3_5_27B))
    if options.tiny:
        config["text_config"]["vocab_size"] = 4096
        config["text_config"].pop("num_token_ids", None)
    bench = Bench(config, "cpu" if options.tiny else "cuda:0", options.tokens)
    ready_s = time.monotonic() - began
    try:
        report = measure(bench, options.repeats)
    finally:
        bench.close()
    worst = max(report[mode][name]["cost"] for mode in report for name in ("texts", "objects"))
    device = "cpu, tiny" if options.tiny else torch.cuda.get_device_name(0)
    document = {
        "check": "device_grammar",
        "device": device,
        "weights": "random",
        "bar": BAR,
        "worst_cost": worst,
        "ratio": 1 + worst,
        "holds": worst <= BAR,
        "ready_s": ready_s,
        "seconds": time.monotonic() - began,
        **report,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(document) + "\n")
    print(json.dumps(document))
    return 0 if options.tiny or worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
