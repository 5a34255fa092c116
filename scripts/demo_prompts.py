"""Builds the training prompts of the demo's drafters from sources that have nothing to do with the measured ones.

Maths from the training part of GSM8K; code, summaries and edits from the functions and docstrings of this Python's
standard library; chat from templates and topics of our own. Seeded: the same Python gives the same prompts. A prompt
that shares ten words in a row with a measured one is dropped.

    python scripts/demo_prompts.py --data ../shared/data --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections import Counter
from pathlib import Path

SHINGLE_WORDS = 10
CODE_PROMPTS, TEXT_PROMPTS, CHAT_PROMPTS = 11000, 4500, 9000
CODE_FORMS = (
    "{head}",
    "{head}",
    "Complete the following Python function:\n\n```python\n{head}```",
    "Complete this function.\n\n{head}",
    "Write a Python function `{signature}`. {summary}",
    "Write a function in Python that does the following: {summary}",
    "Implement {name} in Python: {summary} Include a docstring.",
    "Explain what this code does:\n\n```python\n{code}```",
    "Add comments to this function:\n\n```python\n{code}```",
    "Rename the function `{name}` to `{new_name}` and return the whole code:\n\n```python\n{code}```",
    "Rewrite this function with type hints:\n\n```python\n{code}```",
    "Find possible problems in this code and fix them:\n\n{code}",
    "Write unit tests for this function:\n\n```python\n{code}```",
    "Write a docstring for this function:\n\n{bare}",
    "Translate this Python function to JavaScript:\n\n```python\n{bare}```",
)
TEXT_FORMS = (
    "Summarize: {text}",
    "Summarize the following text in a few sentences:\n\n{text}",
    "{text}\n\nSummarize the text above.",
    "Rewrite the following text in simpler words:\n\n{text}",
    "Correct the spelling and grammar of this text:\n\n{text}",
    "Turn this text into a list of bullet points:\n\n{text}",
    "What is the following text about?\n\n{text}",
    "Read this passage and write three questions about it:\n\n{text}",
)
CHAT_FORMS = (
    "Write a blog post about {topic}.", "Write a short story about {topic}.", "Explain {topic} to a child.",
    "What are the advantages and disadvantages of {topic}?", "How does {topic} work?", "Tell me about {topic}.",
    "Write an email to a colleague about {topic}.", "Give me five tips about {topic}.", "Write a poem about {topic}.",
    "Imagine you are an expert on {topic}. What would you tell a beginner?", "Who invented {topic}?",
    "Describe the history of {topic}.", "Compare {topic} with {other}.", "What is {topic}?",
    "Why is {topic} important?",
    "Write a product description about {topic}.", "What should I know before I start with {topic}?",
    "Act as a teacher and give a lesson on {topic}.", "Make a plan for a week around {topic}.",
    "Write a dialogue between two friends about {topic}.", "What are common mistakes in {topic}?",
    "Draft a speech about {topic}.", "List the key facts about {topic}.", "How has {topic} changed over time?",
    "Write a convincing email to a friend who dislikes {topic}, inviting them to an evening about it. Be brief.",
    "Describe a busy day at a place that has to do with {topic}, with sounds and smells, in the first paragraph.",
    "Could you write a captivating short story that begins with: the old letter said nothing about {topic}?",
    "Outline a blog post that compares {topic} and {other} and names two examples for each.",
    "Edit the next paragraph so that nobody can misread it: {topic} are not as {other} was, he said before it was.",
    "Pretend to be a famous expert on {topic} in all that follows. Why should we care about it at all?",
    "Play the part of a patient teacher. A pupil asks how {topic} relates to {other}. Answer in simple words.",
    "You are a character from a novel who loves {topic}. Say what you think of {other}.",
    "Take on the role of a travel guide and recommend three places for people who enjoy {topic}.",
    "Act as an interviewer. Ask me five questions about {topic}, one at a time.",
    "Suppose that {topic} did not exist. What would be different for {other}? Explain your reasoning step by step.",
    "A shop sells books on {topic} for 12 dollars and on {other} for 15. With 60 dollars, how many of each can I buy?",
    "Tom is taller than Ann, Ann is taller than Bob, who likes {topic}. Is Tom taller than Bob? Explain.",
    "Which word does not belong with the others: {topic}, {other}, {topic} again? Explain why.",
    "Sort these into categories and give JSON: {topic}, {other}, a screwdriver, a violin, a pear.",
    "Extract all names and numbers from this: in 1974 Maria Lopez wrote 3 books on {topic}, and Ken Ito 5 on {other}.",
    "Rate these reviews of {topic} from 1 to 5 as JSON: 'I loved it.' 'It was fine.' 'A waste of money.'",
    "In the field of {topic}, what is the most important idea, and how does it relate to {other}?",
    "Explain the main process behind {topic}. What are its steps, and who described them first?",
    "What are the two main factors in {topic}, and how can one measure them? Write down a formula if there is one.",
    "Describe five core principles of {topic} and give a real case for each.",
    "Provide insights into the relation between {topic} and {other} over the last century.",
    "Discuss laws about {topic} and their effect on society. Compare two countries.",
    "Create a lesson plan about {topic} for three lessons of 45 minutes each.",
    "What business etiquette should I know when I work with people in {topic}?",
    "Suggest five award winning documentary films about {topic}, with a short background description for each.",
    "Write a persuasive essay of three paragraphs on why {topic} matters more than {other}.",
    "How do I get started with {topic} on a small budget?", "Can you help me with {topic}? I do not know much.",
    "Write a limerick about {topic} and {other}.", "Give me a recipe for a party about {topic}.",
    "What is the difference between {topic} and {other}?", "I am worried about {topic}. What can I do?",
    "Write a letter of complaint about {topic}.", "Explain {topic} in exactly three sentences.",
    "Tell me a joke about {topic}.", "Write a news report about {topic}.", "Name ten words to do with {topic}.",
    "Hello! I would like to talk about {topic} today.", "Write a review of a book about {topic}.",
    "Is {topic} good or bad? Argue both sides.", "Write the first scene of a play about {topic} and {other}.",
)  # fmt: skip
TOPICS = """
gardening|solar panels|volcanoes|the French Revolution|baking bread|chess|the immune system|electric cars|jazz music
photosynthesis|the Roman Empire|meditation|black holes|learning the guitar|coffee|the stock market|remote work|bees
the ocean|dinosaurs|public speaking|healthy eating|the moon landing|machine learning|databases|the water cycle
hiking in the mountains|a lighthouse keeper|time management|the Renaissance|tea|bridges|the human heart|windmills
painting|saving money|train travel|castles|the solar system|sleep|friendship|robots|a lost dog|winter|job interviews
climate|recycling|medieval cities|deserts|penguins|probability|gravity|the printing press|a space station|yoga
cooking pasta|the alphabet|earthquakes|cycling in the city|magnets|the theatre|democracy|vaccines|a haunted house
sailing|the telephone|wild birds|computer networks|the piano|genetics|a village market|urban planning|whales
the Silk Road|origami|negotiation|steam engines|the brain|camping|rivers|inflation|a detective in Paris|stars
photography|the internet|evolution|running a marathon|cheese|glaciers|ancient Egypt|tennis|encryption|a talking tree
""".replace("\n", "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=9)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    rows = [*maths(chosen.data), *code_and_text(chance), *chat(chance)]
    measured = measured_shingles(chosen.data)
    kept = [row for row in rows if not shingles(row["prompt"]) & measured]
    chance.shuffle(kept)
    with chosen.out.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    counts = Counter(row["kind"] for row in kept)
    print(json.dumps({"kept": dict(counts), "dropped": len(rows) - len(kept), "python": sys.version.split()[0]}))


def maths(data: Path) -> list[dict[str, str]]:
    """Questions as they stand, like those that are measured."""
    lines = (data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"kind": "maths", "prompt": json.loads(line)["question"]} for line in lines]


def chat(chance: random.Random) -> list[dict[str, str]]:
    """Templates times topics."""
    topics = [topic for topic in TOPICS.split("|") if topic]
    pairs = [(form, topic) for form in CHAT_FORMS for topic in topics]
    chosen = chance.sample(pairs, min(CHAT_PROMPTS, len(pairs)))
    return [{"kind": "chat", "prompt": f.format(topic=t, other=chance.choice(topics))} for f, t in chosen]


def code_and_text(chance: random.Random) -> list[dict[str, str]]:
    """From the standard library of this Python."""
    functions: list[dict[str, str]] = []
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "idlelib" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found = function_parts(node, source)
                functions += [found] if found else []
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                texts += [" ".join(text.split())] if 300 <= len(text) <= 2400 and text.count(">>>") < 2 else []
    prompts: list[dict[str, str]] = []
    while len(prompts) < CODE_PROMPTS:
        parts = chance.choice(functions)
        form = chance.choice(CODE_FORMS)
        if ("{summary}" in form or "{head}" in form) and not parts["summary"]:
            continue
        prompts.append({"kind": "code", "prompt": form.format(**parts)})
    chosen = chance.sample(texts * 3, min(TEXT_PROMPTS, 3 * len(texts)))
    prompts += [{"kind": "summary", "prompt": chance.choice(TEXT_FORMS).format(text=text)} for text in chosen]
    unique = {row["prompt"]: row for row in prompts}
    return list(unique.values())


def function_parts(node: ast.FunctionDef, source: str) -> dict[str, str] | None:
    """Pieces of a function for the forms, None if it is too long or too short."""
    lines = source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    code = textwrap.dedent("".join(lines)).strip("\n") + "\n"
    if not 4 <= len(lines) <= 40 or len(code) > 1600 or node.name.startswith("test"):
        return None
    doc = ast.get_docstring(node) or ""
    body = node.body[1:] if doc else node.body
    if not body:
        return None
    head_end = (body[0].lineno - node.lineno) if doc else 1
    bare = ast.unparse(ast.FunctionDef(**{**{f: getattr(node, f, None) for f in node._fields}, "body": body}, lineno=0))
    summary = " ".join(doc.split("\n\n")[0].split())
    return {
        "name": node.name,
        "new_name": f"compute_{node.name.strip('_')}",
        "signature": f"{node.name}({ast.unparse(node.args)})",
        "summary": summary if summary.endswith(".") else f"{summary}." if summary else "",
        "code": code,
        "bare": bare + "\n",
        "head": textwrap.dedent("".join(lines[:head_end])),
    }


def shingles(text: str) -> set[int]:
    """Hashes of every ten words in a row."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(len(words) - SHINGLE_WORDS + 1)}


def measured_prompts(data: Path) -> list[tuple[str, str]]:
    """(kind of work, prompt) of every set that is measured."""
    with gzip.open(data / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        found = [("code", json.loads(line)["prompt"]) for line in file]
    lines = (data / "gsm8k_test_400.jsonl").read_text(encoding="utf-8").splitlines()
    found += [("maths", json.loads(line)["question"]) for line in lines]
    kinds = {"summarization": "summary", "math_reasoning": "maths", "coding": "code", "math": "maths"}
    for line in (data / "spec_bench_320.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        known = {"translation", "qa", "rag", *kinds}
        kind = kinds.get(row["category"], row["category"] if row["category"] in known else "chat")
        found += [(kind, row["turns"][0])]
    return found


def measured_shingles(data: Path) -> set[int]:
    """Of all measured prompts."""
    return {each for _, prompt in measured_prompts(data) for each in shingles(prompt)}


if __name__ == "__main__":
    main()
