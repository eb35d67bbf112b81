"""Guesses how the recorded text goes on: their rows are those that the model computes, their numbers a tree's."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from attnlab.inspect.draft_tree import DraftTree
from attnlab.inspect.samples import Sample, turned
from tests.tolerances import TURNED

LONG = Sample.load("long")
TREE = DraftTree(
    prefix=2011,
    parents=(-1, 0, 0, 0, 1, 2, 2, 3, 5, 6, 7, 9, 9),
    sources=(2011, 1990, 2012, 1963, 1991, 1940, 2013, 1964, 1941, 2014, 1965, 1998, 2015),
)


def again(first: int) -> list[tuple[int, int]]:
    """Neighbouring places of the same word, from a token of the text on."""
    places: dict[str, list[int]] = defaultdict(list)
    for at, token in enumerate(LONG.tokens[first:], first):
        places[token].append(at)
    return [pair for found in places.values() for pair in pairwise(found)]


# Turning


def test_in_layer_0_a_word_that_is_turned_is_the_same_word_elsewhere() -> None:
    recorded = LONG.layer(0)
    here, there = (list(side) for side in zip(*again(0), strict=True))
    by = [b - a for a, b in zip(here, there, strict=True)]
    assert len(by) > 1000
    torch.testing.assert_close(turned(recorded.k[here], by), recorded.k[there], **TURNED)
    assert torch.equal(recorded.v[here], recorded.v[there])


def test_in_layer_0_queries_turn_as_keys_do() -> None:
    recorded, first = LONG.layer(0), LONG.layer(0).first_query
    pairs = again(first)
    here, there = ([pair[side] - first for pair in pairs] for side in (0, 1))
    by = [b - a for a, b in pairs]
    torch.testing.assert_close(turned(recorded.q[here], by), recorded.q[there], **TURNED)


def test_turned_by_nothing_the_bits_are_the_same() -> None:
    k = LONG.layer(18).k
    assert torch.equal(turned(k, [0] * 2048), k)


def test_scores_of_what_is_turned_alike_stay() -> None:
    recorded = LONG.layer(23)
    q, k = recorded.q[:40].double(), recorded.k[:40].repeat_interleave(3, 1).double()
    moved = [turned(x, [700] * 40) for x in (q, k)]
    torch.testing.assert_close((moved[0] * moved[1]).sum(-1), (q * k).sum(-1), **TURNED)


def test_there_is_a_distance_for_every_token() -> None:
    with pytest.raises(ValueError, match="by: expected a distance for each of 2 tokens, got 3"):
        turned(torch.zeros(2, 1, 8), [1, 2, 3])


# The tree


def test_the_texts_own_words_have_the_recorded_rows() -> None:
    for layer in LONG.layers:
        recorded = LONG.layer(layer)
        for draft, row in zip(TREE.accepted, range(2011, 2016), strict=True):
            got = [x[draft] for x in TREE.rows(layer)]
            wanted = recorded.q[row - recorded.first_query], recorded.k[row], recorded.v[row]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_guess_has_the_rows_of_its_word_turned_to_its_own_position() -> None:
    recorded = LONG.layer(18)
    q, k, v = TREE.rows(18)
    assert torch.equal(q[1:2], turned(recorded.q[70:71], [2012 - 1990]))
    assert torch.equal(k[1:2], turned(recorded.k[1990:1991], [2012 - 1990]))
    assert torch.equal(v[1], recorded.v[1990])


def test_a_draft_stands_as_deep_as_its_path_is_long() -> None:
    assert TREE.paths[11] == (0, 2, 6, 9, 11)
    assert TREE.positions == tuple(2010 + len(path) for path in TREE.paths)


def test_what_is_accepted_ends_at_the_first_wrong_word() -> None:
    assert TREE.accepted == (0, 2, 6, 9, 12)
    wrong = DraftTree(prefix=2011, parents=(-1, 0, 1), sources=(2011, 1990, 2013))
    assert wrong.accepted == (0,)
    assert DraftTree(prefix=2011, parents=(-1,), sources=(2012,)).accepted == ()


def test_a_right_word_from_another_place_is_right() -> None:
    assert LONG.tokens[2002] == LONG.tokens[2012]
    assert DraftTree(prefix=2011, parents=(-1, 0), sources=(2011, 2002)).accepted == (0, 1)


def test_numbers_may_change_and_the_tree_stays() -> None:
    order = [0, 2, 6, 9, 12, 1, 3, 4, 5, 7, 8, 10, 11]
    other = TREE.renumbered(order)
    assert other.accepted == (0, 1, 2, 3, 4)
    for new, old in enumerate(order):
        assert [other.sources[i] for i in other.paths[new]] == [TREE.sources[i] for i in TREE.paths[old]]


def test_it_says_where_every_word_is_from() -> None:
    lines = str(TREE).splitlines()
    assert lines[0] == "13 drafts after 2,011 tokens"
    assert lines[3].endswith("  the text's own")
    assert lines[5].strip() == r"4 at 2013 after 1  '\n'            from 1991"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parents": (), "sources": ()}, "parents: expected at least the root's, -1, got none"),
        ({"parents": (-1, 1), "sources": (2011, 2012)}, "parents: draft 1: expected an earlier draft, 0 to 0, got 1"),
        ({"parents": (-1, 0), "sources": (2011,)}, "sources: expected a token of the text for each of 2 drafts, got 1"),
        ({"sources": (1919,)}, r"sources: expected tokens whose query was recorded, 1920 to 2047, got \[1919\]"),
        ({"prefix": 2048}, "prefix: expected the deepest draft within the text's 2,048 tokens, got 2048 and one at"),
        ({"prefix": -1}, "prefix: expected the deepest draft within"),
    ],
)
def test_what_is_no_tree_over_the_text_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(**{"prefix": 2011, "parents": (-1,), "sources": (2011,), **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 1], "order: expected each of the drafts 0 to 2 once; missing: 2; more than once: 1$"),
        ([0, 1, 2, 3], "order: expected each of the drafts 0 to 2 once; no draft: 3$"),
        ([0, 2, 1], r"order: draft \[2\] comes before the one that it follows"),
    ],
)
def test_an_order_has_every_draft_once_and_behind_its_parent(order: list[int], message: str) -> None:
    chain = DraftTree(prefix=2011, parents=(-1, 0, 1), sources=(2011, 2012, 2013))
    with pytest.raises(ValueError, match=message):
        chain.renumbered(order)
