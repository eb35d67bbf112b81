"""A tree of guesses how the recorded text goes on, with real rows: what the verify step of a lesson works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from attnlab.checks import require, whole
from attnlab.inspect.samples import Sample, turned
from attnlab.mask import ancestors, depths


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Drafts after the first `prefix` tokens of the long text; draft i follows `parents[i]`, and the root, 0, has -1.

    `sources[i]` is the token of the text that draft i has its word and its rows from. Where that is the token at the
    draft's own position, the draft is what the text says there; else it is another word of the text, moved.

    >>> tree = DraftTree(prefix=2011, parents=(-1, 0, 0), sources=(2011, 1990, 2012))
    >>> print(tree)
    3 drafts after 2,011 tokens
      0 at 2011          ' any'        the text's own
      1 at 2012 after 0  ' liability'  from 1990
      2 at 2012 after 0  ' such'       the text's own
    >>> tree.accepted
    (0, 2)
    """

    prefix: int
    parents: tuple[int, ...]
    sources: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("parents", "sources"):
            object.__setattr__(self, name, tuple(whole(name, number) for number in getattr(self, name)))
        count, given = len(self.parents), len(self.sources)
        require(count > 0, "parents: expected at least the root's, -1, got none")
        require(given == count, f"sources: expected a token of the text for each of {count} drafts, got {given}")
        last, sample = max(self.positions), Sample.load("long")
        end, first = len(sample.tokens), sample.layer(0).first_query
        require(
            self.prefix >= 0 and last < end,
            f"prefix: expected the deepest draft within the text's {end:,} tokens, got {self.prefix} and one at {last}",
        )
        bad = [source for source in self.sources if not first <= source < end]
        require(not bad, f"sources: expected tokens whose query was recorded, {first} to {end - 1}, got {bad[:4]}")

    def __str__(self) -> str:
        """Return a line for each draft: where it stands, which draft it follows, its word, and where that is from."""
        after = ["" if parent < 0 else f"after {parent}" for parent in self.parents]
        words = [repr(token) for token in self.tokens]
        wide, long = max(map(len, after)), max(map(len, words))
        lines = [f"{len(words)} draft{'s' * (len(words) != 1)} after {self.prefix:,} tokens"]
        for i, (position, source) in enumerate(zip(self.positions, self.sources, strict=True)):
            origin = "the text's own" if source == position else f"from {source}"
            lines.append(f"{i:3} at {position} {after[i]:{wide}}  {words[i]:{long}}  {origin}")
        return "\n".join(lines)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where each draft stands in its request: as far behind the cached tokens as its path is long."""
        return tuple(self.prefix + depth for depth in depths(self.parents))

    @property
    def tokens(self) -> tuple[str, ...]:
        """The drafts' words."""
        text = Sample.load("long").tokens
        return tuple(text[source] for source in self.sources)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The drafts from the root to each draft, itself included."""
        return tuple(tuple(row.nonzero()[:, 0].tolist()) for row in ancestors(self.parents))

    @property
    def accepted(self) -> tuple[int, ...]:
        """The drafts, from the root downwards, that say what the text says: a model that goes on so keeps them."""
        text = Sample.load("long").tokens
        path: list[int] = []
        for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == (path[-1] if path else -1) and token == text[self.prefix + len(path)]:
                path.append(i)
        return tuple(path)

    def rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the drafts' q `[drafts, heads, qk_dim]`, k and v `[drafts, kv_heads, dim]`, fp16, in a layer.

        They are the rows of the drafts' sources, q and k turned to the drafts' positions (see `turned`): exact for
        the text's own words, and in layer 0 for all.
        """
        recorded = Sample.load("long").layer(layer)
        by = [position - source for position, source in zip(self.positions, self.sources, strict=True)]
        asked = [source - recorded.first_query for source in self.sources]
        sources = list(self.sources)
        return turned(recorded.q[asked], by), turned(recorded.k[sources], by), recorded.v[sources]

    def renumbered(self, order: Sequence[int]) -> DraftTree:
        """Return the same tree with `order[i]` as draft i. Every draft still comes behind the one that it follows."""
        numbers = [whole("order", number) for number in order]
        count = len(self.parents)
        wrong = {
            "missing": [draft for draft in range(count) if draft not in numbers],
            "more than once": [draft for draft in range(count) if numbers.count(draft) > 1],
            "no draft": [number for number in numbers if number not in range(count)],
        }
        words = "; ".join(f"{what}: {', '.join(map(str, which))}" for what, which in wrong.items() if which)
        require(not words, f"order: expected each of the drafts 0 to {count - 1} once; {words}")
        place = {old: new for new, old in enumerate(numbers)} | {-1: -1}
        parents = [place[self.parents[old]] for old in numbers]
        early = [old for new, old in enumerate(numbers) if parents[new] >= new]
        require(not early, f"order: draft {early[:1]} comes before the one that it follows")
        return replace(self, parents=tuple(parents), sources=tuple(self.sources[old] for old in numbers))
