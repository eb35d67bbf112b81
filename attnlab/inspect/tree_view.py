"""Draft trees as plain numbers: who follows whom, and what each draft sees of the cached keys and of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlab.checks import require
from attnlab.inspect.step import Bools, Ints, Runs, Step, prefix_and_new, total
from attnlab.plan.plans import VerifyPlan
from attnlab.spec import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One draft: its number in the batch's request, the draft that it follows (None: a root, or not to be told).

    `first` is where its sight begins. It reads the cached positions `cached` and the drafts `seen`, itself among them;
    `hidden` are drafts that the mask shows, but the window or chunk does not.
    """

    number: int
    parent: int | None
    depth: int
    position: int
    first: int
    cached: Runs
    seen: tuple[int, ...]
    hidden: tuple[int, ...]

    @property
    def cached_keys(self) -> int:
        """Cached keys that it reads."""
        return total(self.cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """The drafts of one request of a verify step, at one layer, after `prefix` cached keys.

    `requests` of the step have drafts, this one among them. `order` are the drafts' numbers from top to bottom: every
    draft before those that follow it, and these before its siblings. `astray` are drafts whose mask shows others than
    the path to the root: where there is one, the mask is no tree. `tokens` are texts: of the drafts, or of all keys.
    """

    request: int
    requests: int
    layer: int
    sight: Sight
    prefix: int
    drafts: tuple[Draft, ...]
    order: tuple[int, ...]
    astray: tuple[int, ...]
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = (0, len(self.drafts), self.prefix + len(self.drafts))
        require(
            len(self.tokens) in known,
            f"tokens: expected a text for each of {known[1]} drafts, or of {known[2]} keys, got {len(self.tokens)}",
        )

    @classmethod
    def of(cls, plan: VerifyPlan, *, request: int, layer: int, tokens: Sequence[str] | None = None) -> TreeView:
        """Look at a request of a plan, as the layers of that number see it. Waits for the device.

        A plan has no parents: they are found again in the mask, by depth.

        >>> import attnlab
        >>> wb = attnlab.workbench("SmolLM2-135M", lens=[11], policy="static", engine="eager", layers=[18])
        >>> batch = attnlab.VerifyBatch.tree(rows=[0], prefix=[8], parents=[[-1, 0, 0]], device="cpu")
        >>> view = TreeView.of(wb.backend.plan(batch), request=0, layer=18)
        >>> [(draft.parent, draft.position, draft.cached_keys, draft.seen) for draft in view.drafts]
        [(None, 8, 8, (0,)), (0, 9, 8, (0, 1)), (0, 9, 8, (0, 2))]
        """
        step = Step.of(plan, request=request, layer=layer)
        shown, depth = _shown(step), step.positions - step.cached
        parents = _parents(shown, depth)
        drafts = tuple(_draft(step, shown, i, parents[i]) for i in range(step.new))
        return cls(
            request=request,
            requests=sum(count > 0 for count in prefix_and_new(plan)[1]),
            layer=layer,
            sight=step.sight,
            prefix=step.cached,
            drafts=drafts,
            order=_depth_first(parents),
            astray=_astray(shown, parents),
            tokens=tuple(tokens or ()),
        )

    @property
    def is_chain(self) -> bool:
        """Whether each draft follows the one before it."""
        return not self.astray and all(draft.parent == (i - 1 if i else None) for i, draft in enumerate(self.drafts))

    @property
    def depth(self) -> int:
        """The depth of the deepest draft."""
        return max((draft.depth for draft in self.drafts), default=0)

    def text(self, draft: int) -> str | None:
        """Return a draft's text, where texts are known."""
        return self.tokens[draft - len(self.drafts)] if self.tokens else None

    def cached_text(self, position: int) -> str | None:
        """Return a cached key's text, where it is known."""
        return self.tokens[position] if len(self.tokens) > len(self.drafts) else None


def _shown(step: Step) -> Bools:
    """Return which drafts the mask shows to which, `[drafts, drafts]`, whatever the sight hides."""
    if step.bits is not None:
        return step.bits[:, step.cached :]
    every = np.ones((step.new, step.new), dtype=np.bool_)
    return np.tril(every) if step.sight.causal else every


def _parents(shown: Bools, depth: Ints) -> list[int | None]:
    """Return for each draft the one that it follows: the only other one that it sees one step less deep."""
    parents: list[int | None] = []
    for i, d in enumerate(depth.tolist()):
        above = [j for j in np.flatnonzero(shown[i]).tolist() if j < i and int(depth[j]) == d - 1]
        parents.append(above[0] if len(above) == 1 else None)
    return parents


def _astray(shown: Bools, parents: Sequence[int | None]) -> tuple[int, ...]:
    """Return the drafts that see others than their path, or begin one where there is a root already."""
    path = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent is not None:
            path[i] |= path[parent]
    wrong = (path != shown).any(axis=1)
    return tuple(i for i, parent in enumerate(parents) if wrong[i] or (parent is None and i > 0))


def _depth_first(parents: Sequence[int | None]) -> tuple[int, ...]:
    followers: dict[int | None, list[int]] = {}
    for i, parent in enumerate(parents):
        followers.setdefault(parent, []).append(i)
    order: list[int] = []
    waiting = followers.get(None, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += followers.get(order[-1], [])[::-1]
    return tuple(order)


def _draft(step: Step, shown: Bools, number: int, parent: int | None) -> Draft:
    seen = step.fresh(number).tolist()
    position = int(step.positions[number])
    return Draft(
        number=number,
        parent=parent,
        depth=position - step.cached,
        position=position,
        first=step.sight.first(position),
        cached=step.old(number),
        seen=tuple(seen),
        hidden=tuple(j for j in np.flatnonzero(shown[number]).tolist() if j not in seen),
    )
