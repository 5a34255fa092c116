"""What the host's look at a text says of its n-grams is what the device's drafter would have done."""

from __future__ import annotations

import random
import time

import pytest

from localspec.engine.shadow import SURE_TOKENS, ShadowWindow, TextShadow


def windows_of(text: list[int], prompt: list[int], room: int = 15, lag: int = 0, piece: int = 3) -> list[ShadowWindow]:
    shadow = TextShadow((), prompt, lag)
    found = []
    for begin in range(0, len(text), piece):
        found += shadow.follow(text[begin : begin + piece], room)
    return found


def test_a_copied_text_is_one_long_run_after_another() -> None:
    prompt = list(range(100, 160))
    found = windows_of([*prompt[:50], 7], prompt)
    assert [w.run for w in found] == [0, 2, 8, 15, 15, 5]
    assert [w.is_sure for w in found] == [False, False, False, True, True, True]
    assert [w.is_echo for w in windows_of([*prompt[:50], 7], prompt, lag=1)] == [False] * 4 + [True] * 2
    assert [w.run for w in windows_of([*prompt[:50], 7], prompt, room=3)][:4] == [0, 2, 3, 3]


def test_a_text_without_repetition_has_nothing_to_say() -> None:
    assert [w.run for w in windows_of(list(range(1000, 1040)), list(range(60)))] == [0] * 40


def test_a_prediction_is_looked_up_and_ends_where_it_ends() -> None:
    shadow = TextShadow(tuple(range(40, 60)), [1, 2, 3], 0)
    found = shadow.follow([*range(40, 60), 1, 2, 3, 9], 15)
    assert [w.run for w in found][:4] == [0, 2, 8, 7] and not shadow.repeats
    shadow = TextShadow(tuple(range(40, 60)), [1, 2, 3], 0)
    shadow.follow(list(range(40, 50)), 15)
    assert shadow.repeats


def test_a_text_that_repeats_at_once_is_followed_round() -> None:
    found = windows_of([5, 6] * 40, [5, 6])
    assert max(w.run for w in found) == 15


def test_windows_are_those_of_a_plain_search() -> None:
    """Against a search of all places for the longest match, which the remembered n-grams stand for."""
    generator = random.Random(4)
    text: list[int] = []
    while len(text) < 400:
        at = generator.randrange(max(len(text) - 30, 1))
        text += (
            text[at : at + generator.randrange(25)] if generator.random() < 0.5 and text else [generator.randrange(40)]
        )
    found = windows_of(text[100:], text[:100])
    at, same = 100, 0
    for window in found:
        known = text[:at]
        lengths = [
            next((n for n in range(12) if n >= end or known[end - 1 - n] != known[-1 - n]), 12)
            for end in range(1, len(known))
        ]
        best = max(lengths)
        place = len(lengths) - lengths[::-1].index(best)
        period = len(known) - place
        drafts = [text[place + n % period] for n in range(min(15, 2 * best))] if best else []
        run = next((n for n, token in enumerate(drafts) if token != text[at + n]), len(drafts))
        same += run == window.run and (best >= SURE_TOKENS) == window.is_sure
        at += window.run + 1
    assert same >= 0.8 * len(found) > 50


def test_a_long_prompt_is_read_in_pieces() -> None:
    shadow = TextShadow((), list(range(5000)), 1)
    assert shadow.follow([1], 15) == [] and not shadow.repeats
    for token in range(2, 40):
        shadow.follow([token], 15)
    assert shadow.repeats


@pytest.mark.parametrize("piece", [1, 4])
def test_following_costs_microseconds(piece: int) -> None:
    """Best of three, generously: the decode thread has some hundred microseconds a step to spare."""
    text = [random.Random(1).randrange(500) for _ in range(2000)]
    best = float("inf")
    for _ in range(3):
        shadow = TextShadow((), text[:200], 1)
        shadow.follow([1], 15)
        started = time.perf_counter()
        for begin in range(200, 2000, piece):
            shadow.follow(text[begin : begin + piece], 15)
        best = min(best, (time.perf_counter() - started) / 1800)
    assert best < 100e-6
