"""PyTorch's scaled_dot_product_attention, over contiguous copies of the keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from attnlab.bench.inputs import Dense, Inputs
from attnlab.bench.peer import Call, Setting, peer, unusual
from attnlab.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Sdpa:
    """One call for all requests of a length. Where keys are shared by heads that ask once, heads are its queries."""

    setting: Setting

    def declines(self, work: Workload) -> str | None:
        """Decline what torch's function has no argument for."""
        what = unusual(work, but=("window", "chunk", "tree", "MLA"))
        return None if what is None else f"torch's function has no {what}"

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return the one way."""
        parts = [_Part.of(inputs, dense) for dense in inputs.dense]

        def run() -> list[Tensor]:
            return [part.run() for part in parts]

        return [Call(run=run, read=lambda answers: together(inputs, answers))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: object
    causal: bool
    shares: bool
    scale: float
    heads: int

    @classmethod
    def of(cls, inputs: Inputs, dense: Dense) -> _Part:
        work, spec = inputs.work, inputs.work.attention
        q, mask, causal = dense.q, None, False
        folded = work.new == 1 or work.mla
        if work.new > 1:
            if work.tree or spec.sight.partial or work.mla:
                mask = inputs.seen(dense)
            elif dense.cached:
                mask = causal_lower_right(work.new, dense.k.shape[2])
            else:
                causal = True
        if folded:  # heads of a group are queries of its one key
            q = q.reshape(q.shape[0], spec.kv_heads, spec.group * work.new, spec.qk_dim)
            mask = mask.repeat(spec.group, 1) if isinstance(mask, Tensor) else mask
        return cls(
            q=q,
            k=dense.k,
            v=dense.v,
            mask=mask,
            causal=causal,
            shares=spec.group > 1 and not folded,
            scale=spec.scale,
            heads=spec.heads,
        )

    def run(self) -> Tensor:
        return functional.scaled_dot_product_attention(
            self.q,
            self.k,
            self.v,
            attn_mask=self.mask,  # type: ignore[arg-type]  # a CausalBias is taken too
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.shares,
        )


def together(inputs: Inputs, answers: list[Tensor]) -> Tensor:
    """Return answers of dense requests, `[reqs, heads, new, v_dim]` or heads folded, as `[tokens, heads, v_dim]`."""
    work, spec = inputs.work, inputs.work.attention
    out = inputs.output()
    for dense, answer in zip(inputs.dense, answers, strict=True):
        shaped = answer.reshape(-1, spec.heads, work.new, spec.v_dim)
        out[dense.rows.flatten()] = shaped.transpose(1, 2).reshape(-1, spec.heads, spec.v_dim)
    return out


peer("sdpa")(Sdpa)
