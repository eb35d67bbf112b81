"""Lesson 07: the extend kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from attnlab.inspect.exercises.registry import ask, exercise, several, whole_numbers
from attnlab.spec import Sight

BLOCK_M, BLOCK_N = 64, 128
"""Queries and keys of a tile: those of interpreted kernels."""
CACHED, NEW = 300, 200
PROMPT, LONGEST = 1024, 200
"""Tokens of the second exercise: of the prompt, and at most of a chunk."""
FOUR = ("first entry", "last entry", "first new", "last new")


@exercise("07-1", Sequence, "a list of two numbers")
def tiles_of_two_loops_and_of_one(answer: Any) -> str:
    """What a causal layer visits, with two lists of keys and with one."""
    two, one = _visited(CACHED, NEW), _visited(0, CACHED + NEW, first_query=CACHED)
    numbers = whole_numbers(answer)
    if len(numbers) != 2:
        return f"Expected a list of two numbers, (a) and (b), got {answer!r}."
    a, b = numbers
    query_tiles, cached_tiles, new_tiles = _up(NEW, BLOCK_M), _up(CACHED, BLOCK_N), _up(NEW, BLOCK_N)
    if a == query_tiles * (cached_tiles + new_tiles):
        return "(a): that would be all of them. A tile of new keys behind the last query of a tile is skipped."
    if a == query_tiles * cached_tiles:
        return "(a): those are the tiles of cached keys alone."
    if a == two - query_tiles * cached_tiles:
        return "(a): those are the tiles of new keys alone."
    if a == one != two:
        return (
            "(a): the new keys are an array of their own, so that their tiles begin anew: the last cached one is cut."
        )
    if a != two:
        return f"(a): there are {query_tiles} tiles of queries. Which tiles of keys does each visit, in either loop?"
    if b == query_tiles * _up(CACHED + NEW, BLOCK_N):
        return "(b): that would be all of them. Where do the keys of the first tile of queries end?"
    if b == two:
        return "(b): in one list the tile that holds the last cached keys holds the first new ones, too."
    return "" if b == one else f"(b): tile i of queries reads the list up to {CACHED} + {BLOCK_M} (i + 1), or its end."


@exercise("07-2", Integral)
def length_of_a_chunk(answer: Any) -> str:
    """The length with which the fewest tiles are visited."""
    length = int(answer)
    if not 1 <= length <= LONGEST:
        return f"Expected 1 to {LONGEST} tokens, got {length}."
    best = min(_prefill(n) for n in range(1, LONGEST + 1))
    visited = _prefill(length)
    if visited == best:
        return ""
    words = f"Chunks of {length} visit {visited} tiles, and fewer would do."
    if length % BLOCK_M:
        return f"{words} The last tile of queries of every chunk has {length % BLOCK_M} of {BLOCK_M}."
    return f"{words} The queries fill their tiles. But {length} cached keys leave a tile of keys with idle columns."


@exercise("07-3", Callable)
def range_of_keys(answer: Any) -> str:
    """The loops of one program, against every pair of a query and a key."""
    sizes = (
        (0, 5, None),
        (6, 5, None),
        (200, 140, None),
        (200, 140, 50),
        (30, 140, 50),
        (200, 140, 1),
        (300, 200, 150),
    )
    for cached, new, window in sizes:
        for block_m, block_n in ((64, 128), (16, 32), (128, 64)):
            for tile in range(_up(new, block_m)):
                case = f"Tile {tile} with {cached} cached and {new} new, window {window}, tiles {block_m} x {block_n}"
                got = several(case, ask(case, answer, tile, cached, new, window, block_m, block_n), FOUR)
                numbers = whole_numbers(got)
                wrong = _wrong(numbers, tile, cached, new, Sight(window=window), block_m, block_n)
                if wrong:
                    return f"{case}: got {tuple(numbers)}. {wrong}"
    return ""


def _wrong(got: list[int], tile: int, cached: int, new: int, sight: Sight, block_m: int, block_n: int) -> str:
    """Say what is wrong with the loops of one program, or nothing."""
    queries = range(cached + tile * block_m, min(cached + (tile + 1) * block_m, cached + new))
    arrays = {"list": range(sight.first(cached), cached), "new keys": range(cached, cached + new)}
    for (name, keys), first, last in zip(arrays.items(), got[::2], got[1::2], strict=True):
        count, end = len(keys), min(len(keys), queries[-1] + 1 - keys.start)
        visited = [at for at in range(0, end, block_n) if _seen(queries, keys[at : min(at + block_n, end)], sight)]
        if first < 0:
            return f"There is no entry {first} of the {name}: the first is 0."
        if not visited:
            if first < last:
                return f"It should visit nothing of the {name}: no query of the tile sees any of the {count}."
            continue
        said = f"Of the {name} it should visit {visited[0]} to {end}."
        if first % block_n and first < last:
            return f"{said} Tiles begin at multiples of {block_n}: round down to one."
        if first != visited[0]:
            where = max(0, sight.first(queries[0]) - keys.start)
            return f"{said} The first query of the tile sees back to {where} there; in which tile is that?"
        if last > count:
            return f"{said} There are {count}: behind them is nothing to read."
        if last != end:
            return f"{said} Where does the last query of the tile stand?"
    return ""


def _seen(queries: range, keys: range, sight: Sight) -> bool:
    """Whether any of the queries sees any of the keys."""
    return any(max(sight.first(query), keys[0]) <= min(query, keys[-1]) for query in queries)


def _visited(cached: int, new: int, *, first_query: int | None = None) -> int:
    """Return how many tiles a head visits where all keys are seen: the list of cached ones, then new ones.

    With `first_query` the new keys are all in one list, and queries begin only there.
    """
    end, at = cached + new, cached if first_query is None else first_query
    lasts = [min(start + BLOCK_M, end) for start in range(at, end, BLOCK_M)]
    return sum(_up(cached, BLOCK_N) + _up(last - cached, BLOCK_N) for last in lasts)


def _prefill(length: int) -> int:
    """Return how many tiles a head visits for the prompt, in chunks of this length."""
    return sum(_visited(at, min(length, PROMPT - at)) for at in range(0, PROMPT, length))


def _up(number: int, size: int) -> int:
    return -(-number // size)
