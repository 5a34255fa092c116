"""Prompts of our own for each kind of work that a benchmark reports by. Data, nothing else.

At least four of each, so that four can be answered at once.
"""

from __future__ import annotations

from types import MappingProxyType

_TOTAL = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result
"""
_LOG = """class Log:
    def __init__(self, path):
        self.path = path
        self.lines = []

    def write(self, text):
        self.lines.append(text)
        with open(self.path, "a") as file:
            file.write(text + "\\n")
"""

WORKLOADS = MappingProxyType(
    {
        "code": (
            "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
            "Write a Python class for a stack with push, pop, peek and is_empty, then show how to use it.",
            "Write a Python function that counts how often each word occurs in a file, ignoring case.",
            "Write a SQL schema for a small library with books, members and loans, and a query for overdue loans.",
        ),
        "chat": (
            "What is a good way to learn to cook when one has never done it?",
            "Tell me about the oceans, in a few short paragraphs.",
            "My neighbour plays loud music at night. How could I talk to him about it?",
            "Which three places would you show a friend who visits the mountains for the first time, and why?",
        ),
        "maths": (
            "A shop sells pens at 3 coins each and books at 12 coins each. Ann buys 4 pens and 2 books and pays with "
            "50 coins. How many coins does she get back? Think step by step.",
            "A train travels 60 kilometres in 45 minutes. How far does it travel in two hours at that speed?",
            "The sum of three consecutive even numbers is 78. Find them, step by step.",
            "A tank fills in 6 hours by one pipe and in 4 hours by another. How long do both take together? Think step "
            "by step.",
        ),
        "summary": (
            "Summarise in three sentences: Bees live in colonies with one queen, many workers and some drones. Workers "
            "gather nectar and pollen, build the comb and guard the hive. In winter the colony forms a cluster to keep "
            "the queen warm and lives on stored honey. In spring the queen lays eggs again and the colony grows until "
            "it may divide: the old queen leaves with half of the workers to find a new home.",
            "Summarise in two sentences: The old bridge was closed in March, because two of its cables had rusted. "
            "Since then all cars take the ferry, which runs every half hour and is full in the morning. The town wants "
            "to mend the bridge before winter, but the firm that was asked needs steel that comes in November.",
            "List the main points: Bread needs flour, water, salt and yeast. The dough is kneaded for ten minutes and "
            "rests for two hours in a warm place. It is then shaped, rests again for half an hour and is baked in a "
            "very hot oven. Steam in the first minutes makes the crust thin and crisp.",
            "Summarise in one sentence: A study followed two thousand people for ten years. Those who walked at least "
            "half an hour a day slept better and were ill less often than the others, whatever their age or weight. "
            "The authors warn that people who are ill walk less, so part of the difference may have another cause.",
        ),
        "editing": (
            f"Rewrite this function with type hints and nothing else changed:\n\n```python\n{_TOTAL}```",
            f"Rename `result` to `amount` in this function and give it back whole:\n\n```python\n{_TOTAL}```",
            f"Add a docstring to each method of this class and change nothing else:\n\n```python\n{_LOG}```",
            f"Let `write` take a level before the text and write both. Give the class back whole:\n\n"
            f"```python\n{_LOG}```",
        ),
    }
)
