"""FlashInfer's batched wrappers over the same pages, where the package is installed: its second and third kernels.

Written against FlashInfer 0.5.3. Its plan is made once and not timed, like attnlab's, and without the fixed sizes that
it has for graphs: the run alone is captured, on the grid that was planned for this batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.bench.inputs import Inputs, offsets, tree_mask
from attnlab.bench.peer import Call, Peer, Setting, imported, peer, unusual
from attnlab.bench.workload import Workload

DIMS = (64, 128, 256)
"""Columns of keys and values that its kernels over pages are offered for: both alike, as one stride is for both."""
LATENT = (576, 512)
SCRATCH_BYTES = 512 << 20


class FlashInfer:
    """Its decode, prefill and MLA wrappers under one of its kernel families.

    `package` is the module, or None and why there is none in `problem`.
    """

    def __init__(self, package: Any, *, problem: str = "", family: str, device: torch.device) -> None:
        self.package, self.problem, self.family, self.device = package, problem, family, device

    @classmethod
    def of(cls, setting: Setting, family: str) -> FlashInfer:
        """Look for the package."""
        if setting.device.type != "cuda":
            return cls(None, problem="runs on a GPU alone", family=family, device=setting.device)
        package, problem = imported("flashinfer")
        return cls(package, problem=problem, family=family, device=setting.device)

    def declines(self, work: Workload) -> str | None:
        """Decline without the package, and what the wrappers have no argument for."""
        if self.problem:
            return self.problem
        spec = work.attention
        what = unusual(work, but=("window", "soft cap", "tree", "fp8 keys", "MLA"))
        if what is not None:
            return f"these wrappers have no {what}"
        columns = (spec.qk_dim, spec.v_dim)
        if work.mla:
            if columns != LATENT or work.tree or spec.sight.partial or work.kv_dtype.itemsize == 1:
                return "its MLA is offered for 512 + 64 columns in 16 bits, chains, and no window"
            return None
        if spec.qk_dim != spec.v_dim:
            return "its pages hold keys and values of the same columns"
        if spec.qk_dim not in DIMS:
            return f"not offered for {spec.qk_dim} columns"
        if self.family == "fa3" and (work.mode == "decode" or work.tree or work.kv_dtype.itemsize == 1):
            return "fa3 is offered for prefill in 16 bits, without masks"
        return None

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return the one way, planned."""
        if inputs.work.mla:
            return [self._latent(inputs)]
        return [self._decode(inputs) if inputs.work.mode == "decode" else self._prefill(inputs)]

    def _scratch(self) -> Tensor:
        return torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)

    def _decode(self, inputs: Inputs) -> Call:
        work, spec = inputs.work, inputs.work.attention
        wrapper = self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._scratch(), "NHD", use_tensor_cores=True, backend=self.family
        )
        indptr, indices, last = _paged(inputs)
        wrapper.plan(
            indptr,
            indices,
            last,
            spec.heads,
            spec.kv_heads,
            spec.qk_dim,
            work.page_size,
            # Pages of one slot are listed from the first key that is seen on: there is no window left to look through.
            window_left=-1 if spec.window is None or work.page_size == 1 else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=work.dtype,
            kv_data_type=work.kv_dtype,
            sm_scale=spec.scale,
        )
        return self._over_pages(inputs, wrapper)

    def _prefill(self, inputs: Inputs) -> Call:
        work, spec = inputs.work, inputs.work.attention
        wrapper = self.package.BatchPrefillWithPagedKVCacheWrapper(self._scratch(), "NHD", backend=self.family)
        indptr, indices, last = _paged(inputs)
        mask = None
        if work.tree:
            own = tree_mask(work.tree)
            rows = [torch.cat([own.new_ones(work.new, n), own], dim=1).flatten() for n in work.cached]
            mask = torch.cat(rows).to(self.device)
        wrapper.plan(
            offsets([work.new] * work.requests, self.device),
            indptr,
            indices,
            last,
            spec.heads,
            spec.kv_heads,
            spec.qk_dim,
            work.page_size,
            head_dim_vo=spec.v_dim,
            custom_mask=mask,
            causal=mask is None,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            sm_scale=spec.scale,
            q_data_type=work.dtype,
            kv_data_type=work.kv_dtype,
        )
        return self._over_pages(inputs, wrapper)

    def _over_pages(self, inputs: Inputs, wrapper: Any) -> Call:
        size, view, out = inputs.work.page_size, inputs.pool.view(0), inputs.output()
        paged = tuple(x.view(-1, size, *x.shape[1:]) for x in (view.k, view.v))
        return Call(run=lambda: wrapper.run(inputs.q, paged, out=out))

    def _latent(self, inputs: Inputs) -> Call:
        work, spec = inputs.work, inputs.work.attention
        wrapper = self.package.mla.BatchMLAPagedAttentionWrapper(self._scratch(), backend=self.family)
        indptr, indices, _ = _paged(inputs)
        rope = spec.qk_dim - spec.v_dim
        wrapper.plan(
            offsets([work.new] * work.requests, self.device),
            indptr,
            indices,
            torch.tensor(work.lens, dtype=torch.int32, device=self.device),
            spec.heads,
            spec.v_dim,
            rope,
            work.page_size,
            work.new > 1,  # causal: drafts, or new tokens, see what stands before them
            spec.scale,
            work.dtype,
            work.kv_dtype,
        )
        rows = inputs.pool.view(0).k.view(-1, work.page_size, spec.qk_dim)
        kept, turned = rows[..., : spec.v_dim], rows[..., spec.v_dim :]
        q_kept, q_turned = (x.contiguous() for x in inputs.q.split([spec.v_dim, rope], dim=-1))
        out = inputs.output()
        return Call(run=lambda: wrapper.run(q_kept, q_turned, kept, turned, out=out))


def _paged(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, pages and the tokens in each last page, int32; pages that no query sees are left away.

    Positions are told from the end, so that windows and masks are those of the whole request.
    """
    work, first = inputs.work, inputs.work.attention.sight.first
    seen = [int(first(work.position(r, 0))) // work.page_size for r in range(work.requests)]
    pages = [own[start:] for own, start in zip(inputs.pages, seen, strict=True)]
    last = [(n - 1) % work.page_size + 1 for n in work.lens]
    return (
        offsets([len(own) for own in pages], inputs.device),
        torch.cat(pages).int(),
        torch.tensor(last, dtype=torch.int32, device=inputs.device),
    )


@peer("flashinfer-fa2")
def fa2(setting: Setting) -> Peer:
    """Return its kernels for all recent GPUs."""
    return FlashInfer.of(setting, "fa2")


@peer("flashinfer-fa3")
def fa3(setting: Setting) -> Peer:
    """Return its kernels for Hopper."""
    return FlashInfer.of(setting, "fa3")
