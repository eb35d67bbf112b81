"""Index lists of multi-step drafting: how large they are, and what is in them."""

from __future__ import annotations

from attnlab.checks import positive, require, whole


def draft_kv_indices_buffer_width(num_seqs: int, topk: int, max_context_len: int) -> int:
    """Return the entries that one step's lists may take: every branch of every sequence at its longest.

    Raises ValueError where they are 2^31 or more, which 32-bit offsets cannot count.
    """
    width = positive("num_seqs", num_seqs) * positive("topk", topk) * positive("max_context_len", max_context_len)
    require(
        width < 2**31,
        f"num_seqs, topk, max_context_len: expected a product below 2^31, got {num_seqs} x {topk} x {max_context_len}",
    )
    return width


def draft_kv_indices_used_len(seq_lens_sum: int, topk: int, bs: int, n: int) -> int:
    """Return the live entries of the step whose branches hold n drafts each: `bs` branches, topk a sequence."""
    sizes = {"seq_lens_sum": seq_lens_sum, "topk": topk, "bs": bs, "n": n}
    numbers = {name: whole(name, size) for name, size in sizes.items()}
    for name, size in numbers.items():
        require(size >= 0, f"{name}: expected at least 0, got {size}")
    return numbers["seq_lens_sum"] * numbers["topk"] + numbers["bs"] * numbers["n"]
