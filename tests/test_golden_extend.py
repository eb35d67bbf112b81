"""Extend, one pass and verify against numbers that the original's kernels gave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlab.assets import data_path
from attnlab.engines import engine_for
from attnlab.mask import CAUSAL, CustomMask, Mask
from attnlab.memory.pool import KVView
from attnlab.plan.extend_call import ExtendCall, VerifyCall
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import ExtendLane, Lane, Queries
from attnlab.plan.policy import SplitBounds, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import splits_of_sizes
from attnlab.plan.workspace import Workspace
from attnlab.spec import AttentionSpec
from tests.cases import ENGINES
from tests.tolerances import GOLDEN

EXTEND = [
    "extend_causal_prefix_scales",
    "extend_noncausal",
    "extend_prefix_custom_mask",
    "extend_skip_extend",
    "extend_skip_prefix",
    "extend_sliding_window",
    "extend_window_mask_offsets_skip",
]
UNIFIED = ["unified_causal", "unified_custom_mask", "unified_xai"]
VERIFY = "verify_splitkv"
engines = pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])


class Golden:
    """A file of the original, as a call of ours."""

    def __init__(self, name: str, device: str) -> None:
        with np.load(data_path(f"golden/original/{name}.npz")) as file:
            self.arrays = {key: torch.from_numpy(file[key]).to(device) for key in file.files}
        self.one_pass = name.startswith("unified")
        a = self.arrays
        self.indptr = a["unified_kv_indptr" if self.one_pass else "kv_indptr"].int()
        self.slots = a["unified_kv_indices" if self.one_pass else "kv_indices"].long()
        self.new = a["qo_indptr"].int().diff()
        clipped = (
            a["window_kv_offsets"].int() if self.number("sliding_window_size") > 0 and "custom_mask" in a else None
        )
        self.start = torch.zeros_like(self.new) if clipped is None else clipped
        listed = self.indptr.diff() - (self.new if self.one_pass else 0)
        self.cached = self.start + listed

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.arrays[name]) if name in self.arrays else default

    def spec(self) -> AttentionSpec:
        a, temperature = self.arrays, int(self.number("xai_temperature_len", -1))
        radius = int(self.number("sliding_window_size", -1))
        return AttentionSpec(
            heads=a["q"].shape[1],
            kv_heads=a["k_buffer"].shape[1],
            qk_dim=a["q"].shape[2],
            v_dim=a["v_buffer"].shape[2],
            scale=self.number("sm_scale"),
            causal=bool(self.number("is_causal", 1)),
            window=radius + 1 if radius > 0 else None,  # the original's number is a radius
            softcap=self.number("logit_cap") or None,
            temperature_len=temperature if temperature > 0 else None,
            has_sinks="sinks" in a,
        )

    def mask(self) -> Mask:
        """The file's mask; where the original was told to skip the prefix' part of it, that part is all visible."""
        if "custom_mask" not in self.arrays:
            return CAUSAL
        bits, rows = self.arrays["custom_mask"].to(torch.uint8), []
        for at, n, p in zip(self.arrays["mask_indptr"].tolist(), self.new.tolist(), self.cached.tolist(), strict=False):
            mine = bits[at : at + n * (p + n)].view(n, p + n).clone()
            if self.number("skip_prefix_custom_mask"):
                mine[:, :p] = 1
            rows.append(mine)
        return CustomMask.of(rows)

    def call(self, out: Tensor, lse: Tensor | None) -> ExtendCall:
        a, spec = self.arrays, self.spec()
        within = torch.cat([torch.arange(n, device=out.device) for n in self.new.tolist()]).int()
        keys = (self.cached + self.new).long()
        layout = KVLayout(
            index=KVIndex(indptr=self.indptr, slots=self.slots, space="pool"),
            start=self.start,
            start_visible=self.start,
            sight=spec.sight,
        )
        nothing = torch.zeros(a["q"].shape[0], dtype=torch.int64, device=out.device)
        parts = "new" if self.number("skip_prefix") else "cached" if self.number("skip_extend") else "all"
        blank = [a["q"].new_zeros(a["q"].shape[0], spec.kv_heads, dim) for dim in (spec.qk_dim, spec.v_dim)]
        return ExtendCall(
            layer=0,
            spec=spec,
            view=KVView(
                k=a["k_buffer"], v=a["v_buffer"], k_scale=self.number("k_scale", 1), v_scale=self.number("v_scale", 1)
            ),
            lane=ExtendLane(layout=layout, write_slots=nothing),
            queries=Queries(
                indptr=a["qo_indptr"].int(),
                positions=self.cached.repeat_interleave(self.new.long()) + within,
                ordered=True,
                most=int(self.new.max()),
                mask=self.mask(),
                mask_indptr=torch.nn.functional.pad((self.new * keys).cumsum(0), (1, 0)),
            ),
            one_pass=self.one_pass,
            q=a["q"],
            k=a.get("k", blank[0]),
            v=a.get("v", blank[1]),
            out=out,
            lse=lse,
            sinks=a.get("sinks"),
            parts=parts,  # type: ignore[arg-type]
        )

    def verify_call(self, out: Tensor, lse: Tensor | None, *, splits: int) -> VerifyCall:
        """The same call over split lists."""
        of, reqs = self.call(out, lse), self.new.shape[0]
        lens = self.indptr.diff()
        cut = splits_of_sizes(
            SplitSizes.of_counts(lens, torch.full_like(lens, splits)),
            lens,
            policy="static",
            bounds=SplitBounds(max_ranges=splits, min_size=32),
            total=self.slots.shape[0],
        )
        spec, most = of.spec, of.queries.most
        lane = Lane(
            layout=of.lane.layout,
            write_slots=of.lane.write_slots,
            splits=cut,
            schedule=Schedule.one_range_a_program(cut, kv_heads=spec.kv_heads),
        )
        work = Workspace(
            max_ranges=reqs * splits, max_drafts=most, heads=spec.heads, v_dims={spec.v_dim}, device=out.device
        )
        work.fill(float("nan"))
        partials = work.partials(count=lane.schedule.partials, group=spec.group * most, v_dim=spec.v_dim)
        shared = {name: getattr(of, name) for name in ("layer", "view", "queries", "q", "k", "v", "sinks")}
        return VerifyCall(spec=spec, lane=lane, partials=partials, out=out, lse=lse, **shared)

    def run(self, engine: str, device: str) -> tuple[Tensor, Tensor]:
        out = torch.full_like(self.arrays["out"], float("nan"))
        lse = torch.full(out.shape[:2], float("nan"), device=device)
        engine_for(engine, device).extend(self.call(out, lse))
        return out, lse


@engines
@pytest.mark.parametrize("name", EXTEND)
def test_extend_gives_the_original_results(name: str, engine: str, device: str) -> None:
    golden = Golden(name, device)
    out, lse = golden.run(engine, device)
    torch.testing.assert_close(out, golden.arrays["out"], **GOLDEN)
    torch.testing.assert_close(lse, golden.arrays["lse"], **GOLDEN)


@engines
@pytest.mark.parametrize("name", UNIFIED[:2])
def test_one_pass_gives_the_original_results(name: str, engine: str, device: str) -> None:
    """`unified_xai` is left to the oracle: that kernel of the original has another formula for the temperature."""
    golden = Golden(name, device)
    torch.testing.assert_close(golden.run(engine, device)[0], golden.arrays["out"], **GOLDEN)


@engines
def test_the_originals_other_temperature_is_not_ours(engine: str, device: str) -> None:
    golden = Golden("unified_xai", device)
    out, _ = golden.run(engine, device)
    # Up to position 7 no temperature acts in either formula.
    early = golden.call(out, None).queries.positions < 7
    torch.testing.assert_close(out[early], golden.arrays["out"][early], **GOLDEN)
    assert not torch.allclose(out[~early], golden.arrays["out"][~early], **GOLDEN)


@engines
def test_verify_gives_what_the_originals_extend_gave(engine: str, device: str) -> None:
    """Its split verify kernel gives NaN for a request without a prefix; the file holds both."""
    golden = Golden(VERIFY, device)
    out, _ = golden.run(engine, device)
    torch.testing.assert_close(out, golden.arrays["out_extend_attention"], **GOLDEN)
    assert bool(golden.arrays["out"][:3].isnan().all())


@engines
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", [*(name for name in EXTEND if "skip_e" not in name and "skip_p" not in name), VERIFY])
def test_splits_give_the_original_results(name: str, splits: int, engine: str, device: str) -> None:
    golden = Golden(name, device)
    out = torch.full_like(golden.arrays["out"], float("nan"))
    engine_for(engine, device).verify(golden.verify_call(out, None, splits=splits))
    want = "out_extend_attention" if name == VERIFY else "out"
    torch.testing.assert_close(out, golden.arrays[want], **GOLDEN)
