"""Makes the demo model's drafters: the target writes questions and answers, drafters are trained and measured.

Stages, all seeded: questions the model writes itself and those of `demo_prompts.py`; answers; second questions about
some of the answers (summaries, edits, follow-ups); hiddens, read once and kept on the card; training of each kind;
acceptance on the measured sets as `measure_acceptance.py` has it, which no stage before it has seen. Answers written
elsewhere can be handed in (`--stored`). Meant for one card; `--sequences 30 --steps 4 --device cpu` tries it anywhere.

`--train` names trainings in order, kind=amount: seconds, or `1300steps`, or the name of a training before it, for as
many steps as that one took. `dflash+base` is a backbone trained at an even rate, on which the dflash and the dspark
that follow go on: both then differ in nothing but the heads.

    python scripts/train_demo_drafters.py --model DIR --prompts prompts.jsonl --data ../shared/data --work DIR --out DIR
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from demo_prompts import measured_shingles, shingles
from measure_acceptance import lengths, measured_answers
from measure_matrix import prompt_sets

from localspec.api.types import Message
from localspec.engine.template import ChatTemplate
from localspec.engine.tokenizer import Tokenizer
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.hub.layout import sha256_of
from localspec.training.answers import Answer, AnswerStore, BatchPlan
from localspec.training.kept import KeptHiddens, keep_what_fits
from localspec.training.parts import set_rounding
from localspec.training.recipe import Recipe, block_taps, train
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
GREEDY_SHARE = 0.85
THREADS = 12
HELD_OUT_SHARE = 0.02
MAX_TOKENS = 1024
TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BASE = "base"
ON_BASE_RATE = 0.75
"""Of the learning rate, in a training that goes on from a base: its layers have settled and its moments begin anew."""
SECONDS_BESIDE = 9.0
"""Of a training: getting ready, measuring, writing the file."""


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

    def all_asked(self, texts: list[str]) -> list[tuple[int, ...]]:
        """One question each; the tokenizer lets other threads run."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.asked, texts))

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
        begin = self.text.before_question()
        found: list[str] = []

        def take(answers: list[Answer]) -> None:
            for answer in answers:
                ids = list(answer.token_ids[answer.prompt_tokens :])
                if ids and ids[-1] in self.stop_ids:
                    found.append(self.text.tokenizer.decode(ids[:-1]).strip())

        asked = [Prompt(begin, greedy=False)] * self.chosen.own
        write_answers(self.target, asked, self.stop_ids, self.limits(OWN_TOKENS, 1.0), take)
        return sorted({text for text in found if len(text) >= 12})

    def write(self, prompts: list[Prompt], store: AnswerStore, tokens: int) -> None:
        """In parts of every length, until the time for writing is up."""
        prompts = [each for each in prompts if len(each.token_ids) <= self.chosen.max_prompt_tokens]
        self.chance.shuffle(prompts)
        size = 2 * self.chosen.max_sequences
        for begin in range(0, len(prompts), size):
            if begin >= self.chosen.most_answers:
                return
            if begin and time.monotonic() - self.begun > self.chosen.write_until:
                self.say(f"no time for {len(prompts) - begin} more answers")
                return
            write_answers(self.target, prompts[begin : begin + size], self.stop_ids, self.limits(tokens), store.append)
            self.say(f"{len(store)} answers")

    def take_stored(self, path: Path, store: AnswerStore) -> None:
        """Answers that this model wrote in an earlier run: `tokens` (uint16) and `index` of a store."""
        with np.load(path) as found:
            tokens, index = found["tokens"], found["index"]
        store.append(
            [
                Answer(tokens[begin : begin + length], start, bool(flags & 1), bool(flags & 2), int(flags >> 2))
                for begin, length, start, flags in index.tolist()
            ]
        )
        self.say(f"{len(index)} answers from {path.name}")

    def answers(self) -> AnswerStore:
        """Of an earlier run in the work folder, or written now."""
        store = AnswerStore(self.chosen.work / "answers")
        if not len(store):
            self.write_all(store)
        entries = store.select(held_out=False)
        self.report["answers"] = {
            "sequences": len(store),
            "training_answer_tokens": store.answer_tokens(entries),
            "by_kind": {kind: len(store.select(False, kind=i)) for i, kind in enumerate(KINDS)},
        }
        self.say(json.dumps(self.report["answers"]))
        return store

    def write_all(self, store: AnswerStore) -> None:
        """Questions and answers."""
        measured = measured_shingles(self.chosen.data)
        for path in self.chosen.stored:
            self.take_stored(path, store)
        rows = [json.loads(line) for line in open_text(self.chosen.prompts)]
        rows = rows[: self.chosen.sequences]
        asked = self.text.all_asked([row["prompt"] for row in rows])
        prompts = [self.prompt(ids, row["kind"]) for ids, row in zip(asked, rows, strict=True)]
        if self.chosen.own:
            own = [text for text in self.own_questions() if not shingles(text) & measured]
            self.say(f"{len(own)} questions of its own")
            prompts += [self.prompt(ids, "own") for ids in self.text.all_asked(own)]
        self.write(prompts, store, self.chosen.answer_tokens)
        self.write(self.second_questions(store, measured), store, self.chosen.answer_tokens)

    def second_questions(self, store: AnswerStore, measured: set[int]) -> list[Prompt]:
        """About answers of the training split, so that long prompts are among the training data."""
        entries = store.select(held_out=False, kind=KINDS.index("own")).tolist()
        entries += store.select(held_out=False, kind=KINDS.index("chat")).tolist()
        prompts: list[Prompt] = []
        for entry in self.chance.sample(entries, min(len(entries), self.chosen.second)):
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

    def measured(self) -> AnswerStore:
        """Greedy answers to the measured sets, in a store of their own whose kinds are the sets' places."""
        store = AnswerStore(self.chosen.work / "measured")
        self.sets = prompt_sets(self.chosen.data, self.chosen.measured)
        measured_answers(self.chosen.model, self.target, self.sets, self.chosen.measured_tokens, store)
        self.say(f"{len(store)} measured answers")
        return store

    def kept(self, store: AnswerStore) -> KeptHiddens | None:
        """For all trainings together, on a card with room for them."""
        plan = BatchPlan(2 * self.chosen.tokens_per_batch, MAX_TOKENS, self.chosen.seed)
        outputs = block_taps(self.target.num_layers)
        found = keep_what_fits(self.target, store, outputs, plan)
        self.say("hiddens are read with every batch" if found is None else "hiddens are kept")
        return found

    def train_all(self, store: AnswerStore, measured: AnswerStore) -> None:
        """The trainings of `--train` in their order; those that are given seconds share what time is left."""
        kept = self.kept(store)
        left = dict(part.split("=") for part in self.chosen.train.split(","))
        took: dict[str, int] = {}
        while left:
            kind, amount = next(iter(left.items()))
            share = 1.0
            if self.chosen.until:
                rest = self.chosen.until - (time.monotonic() - self.begun) - SECONDS_BESIDE * len(left)
                share = rest / max(1.0, sum(in_seconds(each, left) for each in left.values()))
            steps = took[amount] if amount in took else int(amount.removesuffix("steps")) if "steps" in amount else 0
            seconds = 0.0 if steps else share * float(amount)
            took[kind] = self.train(kind, (steps, seconds), store, measured, kept)
            del left[kind]

    def train(
        self, kind: str, amount: tuple[int, float], store: AnswerStore, measured: AnswerStore, kept: KeptHiddens | None
    ) -> int:
        """One training, of so many steps or seconds. Returns its steps."""
        steps, seconds = amount
        chosen, (name, _, part) = self.chosen, kind.partition("+")
        folder, is_base = chosen.work / kind, part == BASE
        base = chosen.work / f"dflash+{BASE}"
        on_base = not is_base and name in ("dflash", "dspark") and (base / "config.json").is_file()
        start = str(chosen.start_from / f"smollm2-135m.{name}") if chosen.start_from else ""
        recipe = Recipe(
            name, chosen.steps or steps, seconds, chosen.seed, "bf16" if is_base else "nvfp4",
            stop_ids=self.stop_ids, max_tokens=MAX_TOKENS,
            mask_token_id=self.text.tokenizer.token_id(MASK_TOKEN) or 0, tokens_per_batch=chosen.tokens_per_batch,
            learning_rate=chosen.rate * (ON_BASE_RATE if on_base else 1.0), floor_share=1.0 if is_base else 0.03,
            measure_every=chosen.measure_every, save_every=1 << 30,
            draft_vocab_size=chosen.draft_vocabulary, sharpness=chosen.sharpness, markov_rank=chosen.markov_rank,
            intermediate_size=chosen.chain_intermediate if name in ("eagle3", "mtp") else 0,
            start_from=str(base) if on_base else start, target_name=TARGET_NAME,
        )  # fmt: skip
        trained = train(recipe, self.target, self.config, store, folder, lambda line: self.say(f"{kind}: {line}"), kept)
        self.report[kind] = {**trained.report, "sha256": sha256_of(folder / "model.safetensors")}
        if is_base:
            return trained.trainer.step
        with tarfile.open(chosen.out / f"{kind}.tar", "w") as archive:
            for file in ("config.json", "model.safetensors"):
                archive.add(folder / file, f"{kind}/{file}")
        set_rounding(trained.drafter.module, True)
        found = {each: lengths(measured, index, self.target, trained.drafter) for index, each in enumerate(self.sets)}
        self.report[kind] |= {"length_by_kind_depth": found}  # type: ignore[operator]
        self.say(f"{kind}: {json.dumps({each: by_depth['4'] for each, by_depth in found.items()})}")
        (chosen.out / "report.json").write_text(json.dumps(self.report, indent=1))
        return trained.trainer.step


def in_seconds(amount: str, left: dict[str, str]) -> float:
    """An amount that shares the time; as much as another training takes what that one takes."""
    while amount in left:
        amount = left[amount]
    return float(amount) if amount.replace(".", "", 1).isdigit() else 0.0


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
    parser.add_argument("--sequences", type=int, default=40000, help="Of the prompts, at most.")
    parser.add_argument("--own", type=int, default=60000, help="Questions that the model tries to write itself.")
    parser.add_argument("--second", type=int, default=6000, help="Questions about its answers.")
    parser.add_argument("--stored", type=Path, nargs="*", default=[], help="Answers of an earlier run.")
    parser.add_argument("--most-answers", type=int, default=1 << 30, help="Of each writing, in whole parts.")
    parser.add_argument("--answer-tokens", type=int, default=192)
    parser.add_argument("--measured", type=int, default=40, help="Prompts of each kind of work.")
    parser.add_argument("--measured-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=704)
    parser.add_argument("--cache-tokens", type=int, default=2_600_000)
    parser.add_argument("--max-sequences", type=int, default=8192)
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--rate", type=float, default=1.3e-3)
    parser.add_argument("--draft-vocabulary", type=int, default=16384)
    parser.add_argument("--markov-rank", type=int, default=32)
    parser.add_argument("--chain-intermediate", type=int, default=2304, help="MLP width of eagle3 and mtp.")
    parser.add_argument("--sharpness", type=float, default=1.3)
    parser.add_argument("--measure-every", type=int, default=500)
    parser.add_argument("--steps", type=int, default=0, help="Of each training; 0: as many as fit into its seconds.")
    parser.add_argument("--train", default="eagle3=150,dspark=60,dflash=50,mtp=60", help="kind=amount, ...")
    parser.add_argument("--write-until", type=float, default=1e9, help="Seconds after which no more answers are begun.")
    parser.add_argument("--until", type=float, default=0, help="Seconds in all, which the trainings share; 0: as said.")
    parser.add_argument("--start-from", type=Path, help="Go on from the drafters of this folder, MODEL.KIND each.")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    chosen.out.mkdir(parents=True, exist_ok=True)
    maker = Maker(chosen)
    store, measured = maker.answers(), maker.measured()
    maker.train_all(store, measured)
    maker.say("done")


if __name__ == "__main__":
    main()
