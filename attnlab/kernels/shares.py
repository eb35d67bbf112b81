"""Device functions of even shares: share c of a line of `total` tiles holds those from `c * total // shares` on.

Where there are fewer tiles than shares one begins at every tile, and some hold nothing. Products pass 2^31.
"""

from __future__ import annotations

from attnlab._triton import jit, tl


@jit
def border(share, total, shares):
    """The first tile of a share; that of share `shares` is the end of the line."""
    return (share.to(tl.int64) * total // shares).to(tl.int32)


@jit
def last_share(tile, total, shares):
    """The last share that begins at a tile or before it."""
    return (((tile.to(tl.int64) + 1) * shares - 1) // tl.maximum(total, 1)).to(tl.int32)


@jit
def begun(tile, total, shares):
    """How many of the places where shares begin are a tile or before it; shares that begin together have one place."""
    return tl.where(shares < total, last_share(tile, total, shares), tile) + 1


@jit
def place(number, total, shares):
    """The tile of one of those places, counted from 0; behind the last of them the end of the line, or beyond it."""
    return tl.where(shares < total, border(number, total, shares), number)
