"""Makes the demo model's drafters: the target writes questions and answers, drafters are trained and measured.

Stages, all seeded: questions the model writes itself and those of `demo_prompts.py`; answers; second questions about
some of the answers (summaries, edits, follow-ups); training of each kind; acceptance on the measured sets, which no
stage before it has seen. Meant for one card; `--sequences 30 --steps 4 --device cpu` tries it anywhere.

    python scripts/train_demo_drafters.py --model DIR --prompts prompts.jsonl --data ../shared/data --work DIR
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tarfile
import time
from datetime import datetime
from pathlib import Path

import torch
from demo_prompts import measured_prompts, measured_shingles, shingles

from localspec.api.types import Message
from localspec.engine.template import ChatTemplate
from localspec.engine.tokenizer import Tokenizer
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.training.answers import AnswerStore
from localspec.training.recipe import Recipe, train
from localspec.training.target import DenseTarget
from localspec.training.writing import Prompt, WritingLimits, write_answers

KINDS = ("chat", "code", "maths", "summary", "rag", "qa", "translation", "own", "second")
SECOND_FORMS = (
    "Summarize: {answer}",
    "Summarize the text below in two sentences.\n\n{answer}",
    "Rewrite this text in a formal tone:\n\n{answer}",
    "{answer}\n\nWhat is the main point of this text?",
    "Use the passage to answer the question.\n\nPassage: {answer}\n\nQuestion: {question}",
    "Correct all mistakes in the following text and return the whole text:\n\n{answer}",
    "Translate to English: {answer}",
)
FOLLOW_UPS = (
    "Can you explain that in more detail?",
    "Rewrite your answer in one paragraph.",
    "Give me an example.",
    "Make it shorter.",
    "Are you sure? Check your answer.",
    "Now write it as a list.",
)
OWN_TOKENS = 96
MASK_TOKEN = "<empty_output>"
GREEDY_SHARE = 0.75
HELD_OUT_SHARE = 0.02


class Text:
    """The model's own template and tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        source = self.tokenizer.config["chat_template"]
        # A fixed day, so that templates that print one give the same text in every run.
        self._template = ChatTemplate(source, self.tokenizer.special_tokens(), lambda: datetime(2026, 1, 1))

    def asked(self, *turns: str) -> tuple[int, ...]:
        """Tokens of a conversation: user, assistant, user, ..."""
        roles = ("user", "assistant")
        messages = [Message(roles[i % 2], turn) for i, turn in enumerate(turns)]
        return self.tokenizer.encode(self._template.render(messages, (), {}))

    def before_question(self) -> tuple[int, ...]:
        """Tokens up to where a user's text begins."""
        mark = "\N{SNOWMAN}"
        text = self._template.render([Message("user", mark)], (), {})
        return self.tokenizer.encode(text.split(mark)[0])


class Maker:
    """Holds what the stages share; every stage says how long it took."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.begun = chosen, time.monotonic()
        self.device = torch.device(chosen.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config = read_config(chosen.model)
        self.target = DenseTarget(self.config, open_checkpoint(chosen.model), self.device, dtype)
        self.text = Text(chosen.model)
        self.stop_ids = (2, 0)
        self.chance = random.Random(chosen.seed)
        self.report: dict[str, object] = {"seed": chosen.seed, "torch": torch.__version__}
        self.say("model loaded")

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {line}", flush=True)

    def prompt(self, ids: tuple[int, ...], kind: str) -> Prompt:
        held_out = self.chance.random() < HELD_OUT_SHARE
        greedy = held_out or self.chance.random() < GREEDY_SHARE
        return Prompt(ids, held_out, KINDS.index(kind), greedy)

    def limits(self, tokens: int, temperature: float = 0.8) -> WritingLimits:
        return WritingLimits(tokens, self.chosen.cache_tokens, self.chosen.max_sequences, temperature, self.chosen.seed)

    def own_questions(self) -> list[str]:
        """Questions that the model writes where a user would."""
        begin, count = self.text.before_question(), self.chosen.sequences // 2
        found: list[str] = []

        def take(answers: list) -> None:  # type: ignore[type-arg]
            for answer in answers:
                ids = list(answer.token_ids[answer.prompt_tokens :])
                if ids and ids[-1] in self.stop_ids:
                    found.append(self.text.tokenizer.decode(ids[:-1]).strip())

        asked = [Prompt(begin, greedy=False)] * count
        write_answers(self.target, asked, self.stop_ids, self.limits(OWN_TOKENS, 1.0), take)
        return sorted({text for text in found if len(text) >= 12})

    def write(self, prompts: list[Prompt], store: AnswerStore, tokens: int) -> None:
        prompts = [each for each in prompts if len(each.token_ids) <= self.chosen.max_prompt_tokens]
        write_answers(self.target, prompts, self.stop_ids, self.limits(tokens), store.append)

    def answers(self) -> AnswerStore:
        """Stages up to the training data."""
        measured = measured_shingles(self.chosen.data)
        rows = [json.loads(line) for line in open_text(self.chosen.prompts)]
        rows = rows[: self.chosen.sequences]
        own = [text for text in self.own_questions() if not shingles(text) & measured]
        self.say(f"{len(own)} questions of its own")
        prompts = [self.prompt(self.text.asked(row["prompt"]), row["kind"]) for row in rows]
        prompts += [self.prompt(self.text.asked(text), "own") for text in own]
        store = AnswerStore(self.chosen.work / "answers")
        self.write(prompts, store, self.chosen.answer_tokens)
        self.say(f"{len(store)} answers")
        self.write(self.second_questions(store, measured), store, self.chosen.answer_tokens)
        entries = store.select(held_out=False)
        self.report["answers"] = {
            "sequences": len(store),
            "training_answer_tokens": store.answer_tokens(entries),
            "by_kind": {kind: len(store.select(False, kind=i)) for i, kind in enumerate(KINDS)},
        }
        self.say(json.dumps(self.report["answers"]))
        return store

    def second_questions(self, store: AnswerStore, measured: set[int]) -> list[Prompt]:
        """About answers of the training split, so that long prompts are among the training data."""
        entries = store.select(held_out=False, kind=KINDS.index("own")).tolist()
        entries += store.select(held_out=False, kind=KINDS.index("chat")).tolist()
        prompts: list[Prompt] = []
        for entry in self.chance.sample(entries, min(len(entries), self.chosen.sequences // 6)):
            ids, start = store.tokens(entry).tolist(), int(store.index[entry, 2])
            answer = self.text.tokenizer.decode(ids[start:])
            question = self.text.tokenizer.decode(ids[:start]).split("user\n")[-1].split("\nassistant")[0].strip()
            if self.chance.random() < 0.35:
                asked = self.text.asked(question, answer, self.chance.choice(FOLLOW_UPS))
            else:
                form = self.chance.choice(SECOND_FORMS)
                asked = self.text.asked(form.format(answer=answer, question=question))
            if not shingles(answer) & measured:
                prompts.append(self.prompt(asked, "second"))
        return prompts

    def measured_answers(self) -> AnswerStore:
        """Greedy answers to the measured sets, in a store of their own."""
        store = AnswerStore(self.chosen.work / "measured")
        rows = measured_prompts(self.chosen.data)[:: self.chosen.measured_every]
        prompts = [Prompt(self.text.asked(text), True, KINDS.index(kind)) for kind, text in rows]
        self.write(prompts, store, self.chosen.measured_tokens)
        self.say(f"{len(store)} measured answers")
        return store

    def train(self, kind: str, seconds: float, store: AnswerStore, measured: AnswerStore) -> None:
        folder = self.chosen.work / f"{kind}"
        mask = self.text.tokenizer.token_id(MASK_TOKEN)
        recipe = Recipe(
            kind, self.chosen.steps, seconds, self.chosen.seed, "nvfp4", stop_ids=self.stop_ids,
            mask_token_id=mask or 0, tokens_per_batch=self.chosen.tokens_per_batch, learning_rate=self.chosen.rate,
            measure_every=self.chosen.measure_every, save_every=1 << 30,
            start_from=str(self.chosen.start_from / f"smollm2-135m.{kind}") if self.chosen.start_from else "",
        )  # fmt: skip
        trained = train(recipe, self.target, self.config, store, folder, lambda line: self.say(f"{kind}: {line}"))
        found: dict[str, object] = {}
        for index, name in enumerate(KINDS):
            entries = measured.select(True, kind=index)
            if len(entries):
                tally = trained.trainer.measure(entries, measured)
                found[name] = {"answers": len(entries), "length": round(tally.length, 4), "rates": tally.per_position}
        self.report[kind] = {**trained.report, "measured": found}
        self.say(f"{kind}: {json.dumps({name: each['length'] for name, each in found.items()})}")  # type: ignore[index]
        with tarfile.open(self.chosen.out / f"{kind}.tar", "w") as archive:
            for name in ("config.json", "model.safetensors"):
                archive.add(folder / name, f"{kind}/{name}")
        (self.chosen.out / "report.json").write_text(json.dumps(self.report, indent=1))


def open_text(path: Path):  # type: ignore[no-untyped-def]
    """Lines of a file, packed or not."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=40000)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--measured-tokens", type=int, default=160)
    parser.add_argument("--measured-every", type=int, default=1)
    parser.add_argument("--max-prompt-tokens", type=int, default=704)
    parser.add_argument("--cache-tokens", type=int, default=2 << 20)
    parser.add_argument("--max-sequences", type=int, default=4096)
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--measure-every", type=int, default=200)
    parser.add_argument("--steps", type=int, default=0, help="Of each training; 0: as many as fit into its seconds.")
    parser.add_argument("--train", default="eagle3=85,dspark=75,dflash=75", help="kind=seconds, comma-separated.")
    parser.add_argument("--start-from", type=Path, help="Go on from the drafters of this folder, MODEL.KIND each.")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    chosen.out.mkdir(parents=True, exist_ok=True)
    maker = Maker(chosen)
    store, measured = maker.answers(), maker.measured_answers()
    for part in chosen.train.split(","):
        kind, seconds = part.split("=")
        maker.train(kind, float(seconds), store, measured)
    maker.say("done")


if __name__ == "__main__":
    main()
