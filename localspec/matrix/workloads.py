"""Prompts of our own for each kind of work that a benchmark reports by. Data, nothing else."""

from __future__ import annotations

from types import MappingProxyType

_FUNCTION = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result
"""

WORKLOADS = MappingProxyType(
    {
        "code": (
            "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
            "Write a Python class for a stack with push, pop, peek and is_empty, then show how to use it.",
        ),
        "chat": (
            "What is a good way to learn to cook when one has never done it?",
            "Tell me about the oceans, in a few short paragraphs.",
        ),
        "maths": (
            "A shop sells pens at 3 coins each and books at 12 coins each. Ann buys 4 pens and 2 books and pays with "
            "50 coins. How many coins does she get back? Think step by step.",
            "A train travels 60 kilometres in 45 minutes. How far does it travel in two hours at that speed?",
        ),
        "summary": (
            "Summarise in three sentences: Bees live in colonies with one queen, many workers and some drones. Workers "
            "gather nectar and pollen, build the comb and guard the hive. In winter the colony forms a cluster to keep "
            "the queen warm and lives on stored honey. In spring the queen lays eggs again and the colony grows until "
            "it may divide: the old queen leaves with half of the workers to find a new home.",
        ),
        "editing": (
            f"Rewrite this function with type hints and nothing else changed:\n\n```python\n{_FUNCTION}```",
            f"Rename `result` to `amount` in this function and give it back whole:\n\n```python\n{_FUNCTION}```",
        ),
    }
)
