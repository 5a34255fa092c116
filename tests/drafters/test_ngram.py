"""The n-gram drafter against a plain scan of the text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import Draft
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths
from localspec.drafters.ngram import NgramDrafter, NgramOptions
from tests.sampling.tables import sequence_state

pytestmark = pytest.mark.torch


def state_of(texts: list[list[int]], corpora: list[list[int]] | None = None) -> SequenceState:
    state = sequence_state(texts, [Sampling()] * len(texts), 9000, capacity=max(map(len, texts)) + 20)
    if corpora:
        width = max(map(len, corpora))
        corpus = torch.full((len(texts), width), 5)
        for slot, corpus_text in enumerate(corpora):
            corpus[slot, : len(corpus_text)] = torch.tensor(corpus_text, dtype=torch.int64)
        lengths = torch.tensor([len(corpus_text) for corpus_text in corpora])
        state = SequenceState(**{**state.__dict__, "corpus": corpus, "corpus_lengths": lengths})
    return state


def depths_of(values: list[int], state: SequenceState, max_depth: int | None = None) -> Depths:
    return Depths(
        torch.tensor(values), max_depth or max(values), tuple(range(len(values))), tuple(state.lengths.tolist())
    )


def propose(
    texts: list[list[int]],
    depths: list[int],
    options: NgramOptions | None = None,
    corpora: list[list[int]] | None = None,
    max_depth: int | None = None,
) -> list[list[int]]:
    state = state_of(texts, corpora)
    before = state.history.clone()
    chosen = options or NgramOptions(min_match_tokens=1, drafts_per_match_token=16)
    draft = NgramDrafter(chosen).propose(depths_of(depths, state, max_depth), state, Cache({}, {}))
    bounded = NgramDrafter(chosen, host_knows=True).propose(depths_of(depths, state, max_depth), state, Cache({}, {}))
    assert torch.equal(draft.token_ids, bounded.token_ids)
    assert torch.equal(state.history, before)
    counts = draft.num_drafts.tolist()
    for row, count in zip(draft.token_ids.tolist(), counts, strict=True):
        assert all(token >= 0 for token in row[:count]) and all(token == -1 for token in row[count:])
    return [row[:count] for row, count in zip(draft.token_ids.tolist(), counts, strict=True)]


def best_match(text: list[int], suffix_of: list[int], longest: int) -> tuple[int, int]:
    """(length, end) of the longest match in `text` that something follows, the rightmost of equals."""
    best = (0, -1)
    for end in range(len(text) - 1):
        length = 0
        while (
            length < min(longest, end + 1, len(suffix_of))
            and text[end - length] == suffix_of[len(suffix_of) - 1 - length]
        ):
            length += 1
        if length and length >= best[0]:
            best = (length, end)
    return best


def test_continues_the_longest_then_the_rightmost_match() -> None:
    assert propose([[1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]], [3]) == [[4, 9, 2]]
    assert propose([[1, 2, 3, 4, 9, 2, 3, 5, 8, 7, 2, 3]], [3]) == [[5, 8, 7]]
    assert propose([[1, 2, 3, 4]], [3]) == [[]]
    assert propose([[1]], [3]) == [[]]


def test_a_run_goes_on_beyond_the_end_of_the_text() -> None:
    assert propose([[5, 6, 7, 6, 7]], [5]) == [[6, 7, 6, 7, 6]]
    assert propose([[3, 8, 8]], [4]) == [[8, 8, 8, 8]]


def test_depths_of_slots_and_columns() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert propose([text, text, text, [1, 2]], [0, 2, 4, 4], max_depth=6) == [[], [4, 5], [4, 5, 6, 1], []]


def test_a_short_match_is_not_trusted_and_a_long_one_allows_more() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3]
    assert propose([text], [9], NgramOptions(min_match_tokens=4)) == [[]]
    assert propose([text], [9], NgramOptions(min_match_tokens=3, drafts_per_match_token=1)) == [[4, 5, 6]]


def test_the_corpus_is_searched_and_ends_where_it_ends() -> None:
    text, corpus = [4, 5, 1, 2, 8, 8, 1, 2], [0, 1, 2, 30, 31]
    assert propose([text], [4], corpora=[corpus]) == [[30, 31]]
    assert propose([text], [4], corpora=[[9]]) == [[8, 8, 1, 2]]
    assert propose([[4, 1, 2, 8, 4, 1, 2]], [2], corpora=[corpus]) == [[8, 4]]  # three tokens in the history, two there
    assert propose([[4, 1, 2], [4, 1, 2]], [2, 2], corpora=[[1, 2, 3], []]) == [[3], []]


def test_agrees_with_a_plain_scan_on_random_texts() -> None:
    rng = random.Random(3)
    for _ in range(60):
        texts = [[rng.randrange(3) for _ in range(rng.choice([1, 2, 5, 33, 64]))] for _ in range(3)]
        drafted = propose(
            texts, [4, 4, 4], NgramOptions(min_match_tokens=1, max_match_tokens=6, drafts_per_match_token=16)
        )
        for text, tokens in zip(texts, drafted, strict=True):
            length, end = best_match(text, text, 6)
            expected: list[int] = []
            if length:
                longer = text + expected
                for place in range(end + 1, end + 5):
                    longer.append(longer[place])
                expected = longer[len(text) :]
            assert tokens == expected


def test_confidence_grows_with_the_match() -> None:
    state = state_of([[1, 2, 3, 4, 5, 9, 1, 2, 3], [2, 3, 4, 5, 9, 1, 2, 3, 4]])
    state.history[1, 0] = 9
    drafter = NgramDrafter(NgramOptions(min_match_tokens=1))
    draft = drafter.propose(depths_of([2, 2], state), state, Cache({}, {}))
    assert draft.confidence is not None
    # Three tokens match in slot 0, two in slot 1; each draft makes the match one longer.
    torch.testing.assert_close(draft.confidence, torch.tensor([[3 / 6, 4 / 7], [2 / 5, 3 / 6]]))


def test_in_front_of_another_drafter_it_needs_a_long_match() -> None:
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    state = state_of([[*phrase, 9, 9, *phrase], [0, *phrase[1:], 9, 9, *phrase]])
    depths = Depths(torch.tensor([2, 2]), 2, (0, 1), tuple(state.lengths.tolist()), only_sure=True)
    draft = NgramDrafter(NgramOptions()).propose(depths, state, Cache({}, {}))
    assert draft.num_drafts.tolist() == [2, 0]


def test_goes_on_behind_the_drafts_of_another() -> None:
    """The text ends with five of the phrase's tokens, the other drafter says three more, then the match is sure."""
    phrase = [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22]
    state = state_of([[*phrase, 9, 9, *phrase[:5]], [*phrase, 9, 9, *phrase[:5]], [*phrase, 9, 9, *phrase[:8]]])
    given = torch.tensor([[6, 7, 8, -1], [6, 7, -1, -1], [-1, -1, -1, -1]])
    draft = Draft(given, torch.zeros_like(given), (given >= 0).sum(1), ("mtp",), torch.full((3, 4), 0.9))
    depths = Depths(torch.tensor([6, 6, 2]), 6, (0, 1, 2), tuple(state.lengths.tolist()))
    longer = NgramDrafter(NgramOptions()).extend(draft, depths, state)
    assert longer.token_ids.tolist() == [[6, 7, 8, 20, 21, 22], [6, 7, -1, -1, -1, -1], [20, 21, -1, -1, -1, -1]]
    assert longer.num_drafts.tolist() == [6, 2, 2] and longer.origin_names == ("mtp", "ngram")
    assert longer.origins[0].tolist() == [0, 0, 0, 1, 1, 1] and longer.origins[2, 0] == 1
    assert longer.confidence is not None
    torch.testing.assert_close(longer.confidence[0, 2:5], torch.tensor([0.9, 8 / 11, 9 / 12]))


def test_a_known_bound_of_the_corpus_is_believed() -> None:
    state = state_of([[4, 1, 2]], [[1, 2, 3]])
    depths = depths_of([1], state)
    drafter = NgramDrafter(NgramOptions())
    for bound, expected in ((3, [[3]]), (0, [[-1]])):
        assert drafter.propose(replace(depths, corpus_bound=bound), state, Cache({}, {})).token_ids.tolist() == expected
