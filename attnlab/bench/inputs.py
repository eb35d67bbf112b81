"""A workload, built: a pool that is filled at random, the queries, and the lists that engines and peers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnlab.backend import AttentionBackend
from attnlab.batch import Batch, DecodeBatch, ExtendBatch, VerifyBatch
from attnlab.bench.workload import Workload
from attnlab.inspect.workbench import H200_MULTIPROCESSORS
from attnlab.kernels.target import multiprocessors_of
from attnlab.mask import depths
from attnlab.memory.pool import KVPool
from attnlab.memory.pools.mha import MHAPool
from attnlab.memory.pools.mla import MLAPool
from attnlab.memory.requests import RequestTable
from attnlab.plan.policy import SplitPolicy
from attnlab.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """Requests of one length, out of the pool: q `[reqs, heads, new, qk_dim]`, k and v `[reqs, kv_heads, keys, dim]`.

    `rows` are their queries among the workload's, `[reqs, new]`; `first` is the position of the first key.
    """

    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cached: int
    first: int


class Inputs:
    """What every engine of a row reads. The pool holds all keys, those of new tokens too; slots are in random order.

    `q` is `[tokens, heads, qk_dim]`; `k` and `v` are new tokens' rows as the pool has them, `[tokens, kv_heads, dim]`,
    None in a decode (`v` under MLA, too). Queries are numbers that fp8 can hold where the keys are fp8, so that
    engines that round them agree.
    """

    def __init__(self, work: Workload, device: torch.device | str) -> None:
        self.work, self.device = work, torch.device(device)
        spec, size = work.attention, work.page_size
        self.model = ModelSpec.uniform(
            spec, layers=1, context_len=max(work.lens), page_size=size, kv_dtype=work.kv_dtype, mla=work.mla
        )
        pages = [-(-n // size) for n in work.lens]
        num_slots = (sum(pages) + 1) * size
        kind = MLAPool if work.mla else MHAPool
        self.pool: KVPool = kind(self.model, num_slots=num_slots, device=self.device)
        self.table = RequestTable(
            max_requests=work.requests,
            max_context=max(work.lens),
            num_slots=num_slots,
            device=self.device,
            page_size=size,
        )
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)) + 1
        self.pages = [own.to(self.device) for own in order.split(pages)]
        for own, length in zip(order.split(pages), work.lens, strict=True):
            slots = (own[:, None] * size + torch.arange(size)).flatten()
            self.table.append(self.table.admit(), slots[:length])
        self.random = torch.Generator(self.device).manual_seed(1)
        view = self.pool.view(0)
        for x in (view.k,) if work.mla else (view.k, view.v):
            self._fill(x)
        self.q = self._normal(work.queries, spec.heads, spec.qk_dim)
        self.sinks = self._normal(spec.heads).float() if spec.has_sinks else None
        self.k = self.v = None
        if work.mode in ("extend", "verify"):
            new = torch.cat([self.slots(r)[n:] for r, n in enumerate(work.cached)])
            self.k = view.k[new].to(work.dtype)
            self.v = None if work.mla else view.v[new].to(work.dtype)

    @property
    def multiprocessors(self) -> int:
        """Those of the device; of an H200 where there is none."""
        return multiprocessors_of(self.device) or H200_MULTIPROCESSORS

    def slots(self, request: int) -> Tensor:
        """Return the slots of a request's tokens in the order of positions, int64, the new ones' included."""
        return self.table.slots_of(request).long()

    def output(self) -> Tensor:
        """Return memory for an answer, `[tokens, heads, v_dim]`: NaN, so that nothing passes for one."""
        shape = (self.work.queries, self.work.attention.heads, self.work.attention.v_dim)
        return torch.full(shape, float("nan"), dtype=self.work.dtype, device=self.device)

    def backend(self, *, engine: str, policy: str | SplitPolicy) -> AttentionBackend:
        """Return a backend over the pool, with scratch for this workload."""
        work = self.work
        return AttentionBackend(
            model=self.model,
            pool=self.pool,
            table=self.table,
            engine=engine,
            policy=policy,
            max_requests=work.requests,
            max_drafts=work.new if work.mode == "verify" else 1,
            multiprocessors=self.multiprocessors,
            deterministic=work.mode == "unified",
        )

    def batch(self) -> Batch:
        """Return the workload as a batch of all requests."""
        work, device = self.work, self.device
        rows, cached = list(range(work.requests)), list(work.cached)
        match work.mode:
            case "decode":
                return DecodeBatch.of(rows=rows, lens=cached, device=device)
            case "verify" if work.tree:
                return VerifyBatch.tree(rows=rows, prefix=cached, parents=[work.tree] * len(rows), device=device)
            case "verify":
                return VerifyBatch.chain(rows=rows, prefix=cached, drafts=work.new, device=device)
            case "extend" | "unified":
                return ExtendBatch.of(rows=rows, prefix=cached, new=[work.new] * len(rows), device=device)

    def listed(self, *, new: bool) -> tuple[Tensor, Tensor]:
        """Return offsets, int32, and slots, int64, of the keys that a peer is given for each request.

        Of a decode those that are seen; else all cached ones, and the `new` ones on demand.
        """
        work, own = self.work, []
        for r in range(work.requests):
            slots = self.slots(r)
            if work.mode == "decode":
                own.append(slots[work.attention.sight.first(work.position(r, 0)) :])
            else:
                own.append(slots if new else slots[: work.cached[r]])
        return offsets([len(x) for x in own], self.device), torch.cat(own)

    @cached_property
    def dense(self) -> list[Dense]:
        """Contiguous copies of the keys and values, one for all requests of a length; of a decode's, those seen."""
        work, view = self.work, self.pool.view(0)
        numbers = torch.arange(work.queries, device=self.device).view(work.requests, work.new)
        found = []
        for cached in dict.fromkeys(work.cached):
            requests = [r for r, n in enumerate(work.cached) if n == cached]
            first = int(work.attention.sight.first(cached - 1)) if work.mode == "decode" else 0
            slots = torch.stack([self.slots(r)[first:] for r in requests])
            rows = numbers[requests]
            k = view.k[slots].transpose(1, 2).contiguous()
            v = k[..., : work.attention.v_dim] if work.mla else view.v[slots].transpose(1, 2).contiguous()
            q = self.q[rows].transpose(1, 2).contiguous()
            found.append(Dense(rows=rows, q=q, k=k, v=v, cached=cached, first=first))
        return found

    def seen(self, dense: Dense) -> Tensor:
        """Return which keys each new token of a dense request sees, bool `[new, keys]`."""
        work, keys = self.work, dense.k.shape[2]
        at = torch.arange(keys, device=self.device)
        if work.tree:
            mask = torch.ones(work.new, keys, dtype=torch.bool, device=self.device)
            mask[:, dense.cached :] = tree_mask(work.tree).to(self.device)
            return mask
        position = torch.arange(work.new, device=self.device)[:, None] + dense.cached
        return (at <= position) & (at >= work.attention.sight.first(position))

    def _normal(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.random, device=self.device, dtype=torch.float32)
        return x.to(self.work.kv_dtype if self.work.kv_dtype.itemsize == 1 else self.work.dtype).to(self.work.dtype)

    def _fill(self, x: Tensor) -> None:
        if x.dtype.itemsize > 1:
            x.normal_(generator=self.random)
            return
        for part in x.split(1 << 16):  # torch draws no numbers in fp8
            part.copy_(torch.randn(part.shape, generator=self.random, device=self.device))


def offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return where each of so many entries begins, and the end: int32 `[counts + 1]`."""
    total = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
    return total.to(torch.int32).to(device)


def tree_mask(parents: Sequence[int]) -> Tensor:
    """Return which drafts each draft of a tree sees: its ancestors and itself, bool `[drafts, drafts]`.

    >>> tree_mask([-1, 0, 0]).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    mask = torch.eye(len(parents), dtype=torch.bool)
    for draft in sorted(range(len(parents)), key=depths(parents).__getitem__):
        if parents[draft] >= 0:
            mask[draft] |= mask[parents[draft]]
    return mask
