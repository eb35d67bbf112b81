"""Lesson 12: trees of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.inspect.draft_tree import DraftTree
from attnlab.inspect.exercises.registry import Wrong, as_tensor, ask, exercise, whole_numbers
from attnlab.mask import ancestors, depths
from attnlab.spec import Sight

CACHED, PARENTS, DRAFT, WINDOW = 100, (-1, 0, 0, 1, 2, 2, 5, 5), 7, 50
"""What 12-1 asks for."""
TREE = DraftTree(
    prefix=2011,
    parents=(-1, 0, 0, 0, 1, 2, 2, 3, 5, 6, 7, 9, 9),
    sources=(2011, 1990, 2012, 1963, 1991, 1940, 2013, 1964, 1941, 2014, 1965, 1998, 2015),
)
"""The lesson's."""
WORDS = "abcd"


@exercise("12-1", Sequence, "a list of three numbers")
def what_a_draft_sees(answer: Any) -> str:
    """A draft's position, how many keys it sees, and the first one under a window."""
    if len(answer) != 3:
        return f"Expected a list of three numbers, (a), (b) and (c), got {answer!r}."
    position, keys, first = whole_numbers(answer)
    stands = CACHED + depths(PARENTS)[DRAFT]
    path = [draft for draft, seen in enumerate(ancestors(PARENTS)[DRAFT].tolist()) if seen]
    if position == CACHED + DRAFT:
        return f"(a): that is its place in the batch. How many steps is draft {DRAFT} away from the root?"
    if position == stands + 1:
        return f"(a) is one too far: the {CACHED} cached tokens stand at 0 to {CACHED - 1}, so the root at {CACHED}."
    if position != stands:
        return f"(a): the root stands at {CACHED}. Draft {DRAFT} follows {PARENTS[DRAFT]}, and so on, up to the root."
    if keys == CACHED + DRAFT + 1:
        return f"(b): those would be all drafts up to {DRAFT}; it sees the ones on its own path alone."
    if keys == stands:
        return "(b) is one too few: a draft sees itself as well."
    if keys != CACHED + len(path):
        return f"(b): it sees {CACHED} cached keys and the drafts on its path. How many are these?"
    expected = Sight(window=WINDOW).first(stands)
    if first == expected - 1:
        return f"(c) is one too early: the window of {WINDOW} counts the draft's own key."
    if first == Sight(window=WINDOW).first(CACHED + DRAFT):
        return f"(c): that is counted from its place in the batch. The window goes back from its position, {stands}."
    return "" if first == expected else f"(c): the draft stands at {stands}, and sees {WINDOW} positions with its own."


@exercise("12-2", Sequence, "a list of drafts")
def nothing_moves(answer: Any) -> str:
    """Numbers with which the accepted path needs no copy."""
    try:
        other = TREE.renumbered(whole_numbers(answer))
    except ValueError as error:
        raise Wrong(f"That is no order of the drafts: {str(error).removeprefix('order: ')}.") from error
    moved = [draft for place, draft in enumerate(other.accepted) if draft != place]
    if not moved:
        return ""
    words = "1 row" if len(moved) == 1 else f"{len(moved)} rows"
    return (
        f"The path is {list(other.accepted)} now, and {words} would still move. A row stays where its draft's number "
        "is its place on the path."
    )


@exercise("12-3", Callable)
def accepted(answer: Any) -> str:
    """The walk from the root to the last draft that the target agrees with."""
    for parents, tokens, chosen in _trees():
        case = f"With parents {parents}, tokens {tokens} and chosen {chosen}"
        drafts = as_tensor(case, ask(case, answer, list(parents), list(tokens), list(chosen))).tolist()
        if not isinstance(drafts, list):
            return f"{case}: expected a list of drafts, got {drafts}."
        got = whole_numbers(drafts)
        expected = _walk(parents, tokens, chosen)
        if got != expected:
            return f"{case}: expected {expected}, got {got}. {_why(got, expected, parents, tokens, chosen)}"
    return ""


Case = tuple[list[int], list[str], list[str]]


def _trees() -> list[Case]:
    """Return trees whose siblings say different words, with what a target chooses after every draft."""
    drawn = random.Random(12)
    cases: list[Case] = [
        ([-1, 0, 0, 1, 2, 3], list("abcbca"), list("ccabda")),
        ([-1], ["a"], ["b"]),
        ([-1, 0, 1, 2], list("abca"), list("bcac")),
        ([-1, 0, 0, 1], list("abcc"), list("dcbb")),
    ]
    while len(cases) < 40:
        parents, tokens = [-1], [drawn.choice(WORDS)]
        for _ in range(drawn.randrange(12)):
            parent, token = drawn.randrange(len(parents)), drawn.choice(WORDS)
            if all((p, t) != (parent, token) for p, t in zip(parents, tokens, strict=True)):
                parents.append(parent)
                tokens.append(token)
        followers = [[tokens[i] for i, p in enumerate(parents) if p == draft] for draft in range(len(parents))]
        chosen = [drawn.choice(mine if mine and drawn.random() < 0.8 else WORDS) for mine in followers]
        cases.append((parents, tokens, chosen))
    return cases


def _walk(parents: Sequence[int], tokens: Sequence[str], chosen: Sequence[str]) -> list[int]:
    path = [0]
    for draft in range(1, len(parents)):
        if parents[draft] == path[-1] and tokens[draft] == chosen[path[-1]]:
            path.append(draft)
    return path


def _why(
    got: list[int], expected: list[int], parents: Sequence[int], tokens: Sequence[str], chosen: Sequence[str]
) -> str:
    """Say what is wrong with a path at the first place where it is."""
    if got[:1] != [0]:
        return "The path begins with the root, which the target itself chose a step ago."
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    last = expected[at - 1]
    if at == len(got):
        return f"After draft {last} the target chooses {chosen[last]!r}; draft {expected[at]} follows it and says that."
    wrong = got[at]
    if wrong not in range(len(parents)):
        return f"There is no draft {wrong}."
    if parents[wrong] != last:
        return f"Draft {wrong} does not follow draft {last}, but {parents[wrong]}: it is on another path."
    return f"After draft {last} the target chooses {chosen[last]!r}, and draft {wrong} says {tokens[wrong]!r}."
