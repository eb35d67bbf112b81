"""The original's own results, reproduced: outputs, partials and log-sum-exps of data/golden/original/decode_*.npz."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlab.assets import data_path
from attnlab.engines import engine_for
from attnlab.memory.pool import KVView
from attnlab.mods.relative_bias import relative_bias
from attnlab.plan.call import DecodeCall
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import Lane
from attnlab.plan.policy import SplitBounds, SplitSizes
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import splits_of_sizes
from attnlab.plan.workspace import Partials, Workspace
from attnlab.spec import AttentionSpec
from tests.cases import ENGINES, FP8
from tests.tolerances import GOLDEN, OUTPUT

NAMES = [
    "decode_gqa_3splits",
    "decode_gqa_sinks_cap",
    "decode_mha_xai_page4_scoremod",
    "decode_gqa_page4_scoremod",
    "decode_empty_rows_sink",
    "decode_empty_rows_nosink",
]


@dataclasses.dataclass
class Golden:
    """One file: the arrays, and our objects around them."""

    arrays: dict[str, Tensor]
    spec: AttentionSpec
    view: KVView
    lane: Lane
    sinks: Tensor | None
    aux: Tensor | None

    @classmethod
    def load(cls, name: str, device: str) -> Golden:
        with np.load(data_path(f"golden/original/{name}.npz")) as file:
            arrays = {key: torch.from_numpy(file[key]).to(device) for key in file.files}
        k, v = arrays["k_buffer"], arrays["v_buffer"]
        cap, temperature = _number(arrays, "logit_cap", 0.0), int(_number(arrays, "xai_temperature_len", -1))
        aux = arrays.get("aux0")
        spec = AttentionSpec(
            heads=arrays["q"].shape[1],
            kv_heads=k.shape[1],
            qk_dim=k.shape[2],
            v_dim=v.shape[2],
            scale=_number(arrays, "sm_scale"),
            softcap=cap or None,
            temperature_len=temperature if temperature > 0 else None,
            mod=None if aux is None else relative_bias,
            has_sinks="sinks" in arrays,
        )
        scales = {name: _number(arrays, name, 1.0) for name in ("k_scale", "v_scale")}
        return cls(arrays, spec, KVView(k=k, v=v, **scales), _lane(arrays, spec), arrays.get("sinks"), aux)

    def run(self, engine: str, device: str) -> tuple[Tensor, Partials]:
        work = Workspace(
            max_ranges=self.lane.splits.capacity,
            max_drafts=1,
            heads=self.spec.heads,
            v_dims={self.spec.v_dim},
            device=device,
        )
        work.fill(float("nan"))
        partials = work.partials(count=self.lane.schedule.partials, group=self.spec.group, v_dim=self.spec.v_dim)
        out = torch.full_like(self.arrays["out"], float("nan"))
        call = DecodeCall(
            layer=0,
            spec=self.spec,
            view=self.view,
            lane=self.lane,
            partials=partials,
            q=self.arrays["q"],
            out=out,
            sinks=self.sinks,
            aux=self.aux,
        )
        engine_for(engine, device).decode(call)
        return out, partials

    def check(self, out: Tensor, partials: Partials, tolerance: dict[str, float]) -> None:
        want = self.arrays["out"]
        # An empty row without a sink is NaN in the original; ours is 0.
        want = torch.where(torch.isnan(want), 0.0, want)
        torch.testing.assert_close(out.to(want.dtype), want, **tolerance)
        self.check_partials(partials, tolerance)

    def check_partials(self, partials: Partials, tolerance: dict[str, float]) -> None:
        """Compare every range's own output and LSE; NaN in the file means that the split was never written."""
        outputs, lses = self.arrays["attn_logits"], self.arrays["attn_lse"]
        owners, group = self.lane.schedule.merge_indptr.tolist(), self.spec.group
        for r in range(self.lane.splits.reqs):
            for head in range(self.spec.heads):
                owner = r * self.spec.kv_heads + head // group
                mine = slice(owners[owner], owners[owner + 1])
                live = mine.stop - mine.start
                assert bool(torch.isnan(lses[r, head, live:]).all())
                torch.testing.assert_close(partials.lse[mine, head % group], lses[r, head, :live], **tolerance)
                torch.testing.assert_close(partials.output[mine, head % group], outputs[r, head, :live], **tolerance)


def _number(arrays: dict[str, Tensor], name: str, default: float | None = None) -> float:
    return float(arrays[name]) if name in arrays or default is None else default


def _lane(arrays: dict[str, Tensor], spec: AttentionSpec) -> Lane:
    indptr, counts = arrays["kv_indptr"].int(), arrays["num_kv_splits"].int()
    lens = indptr.diff()
    sizes = SplitSizes.of_counts(lens, counts[: lens.shape[0]])
    bounds = SplitBounds(max_ranges=int(arrays["max_kv_splits"]), min_size=32)
    splits = splits_of_sizes(sizes, lens, policy="golden", bounds=bounds, total=int(indptr[-1]))
    index = KVIndex(indptr=indptr, slots=arrays["kv_indices"].long(), space="pool")
    return Lane(
        layout=KVLayout.full(index),
        splits=splits,
        schedule=Schedule.one_range_a_program(splits, kv_heads=spec.kv_heads),
        write_slots=torch.zeros(lens.shape[0], dtype=torch.int64, device=lens.device),
    )


@pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
@pytest.mark.parametrize("name", NAMES)
def test_the_original_results_are_reproduced(name: str, engine: str, device: str) -> None:
    golden = Golden.load(name, device)
    golden.check(*golden.run(engine, device), GOLDEN)


@pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP8], ids=["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_original_results_hold_at_lower_precision(name: str, dtype: torch.dtype, engine: str, device: str) -> None:
    """The same inputs, rounded, against the fp64 oracle on the rounded ones."""
    from attnlab.eager import oracle

    golden = Golden.load(name, device)
    q_dtype = torch.bfloat16 if dtype == FP8 else dtype
    k_scale, v_scale = (0.05, 0.2) if dtype == FP8 else (golden.view.k_scale, golden.view.v_scale)
    k, v = ((golden.arrays[n] / s).to(dtype) for n, s in (("k_buffer", k_scale), ("v_buffer", v_scale)))
    golden.arrays["q"] = golden.arrays["q"].to(q_dtype)
    golden.arrays["out"] = golden.arrays["out"].to(q_dtype)
    golden.view = KVView(k=k, v=v, k_scale=k_scale, v_scale=v_scale)
    out, _ = golden.run(engine, device)
    index, spec = golden.lane.layout.index, golden.spec
    offsets = index.indptr.tolist()
    for r in range(index.reqs):
        slots = index.slots[offsets[r] : offsets[r + 1]]
        want, _ = oracle.attention(
            golden.arrays["q"][r],
            k.double()[slots] * k_scale,
            v.double()[slots] * v_scale,
            scale=spec.scale,
            softcap=spec.softcap,
            temperature_len=spec.temperature_len,
            modify=None if golden.aux is None else _bias(golden.aux[r]),
            sinks=golden.sinks,
        )
        torch.testing.assert_close(out[r].double(), want, **OUTPUT[q_dtype])


def _bias(table: Tensor):
    def modify(scores: Tensor, q_pos: int, kv_pos: Tensor, head: int) -> Tensor:
        near = q_pos - kv_pos < table.shape[1]
        added = table[head].double()[(q_pos - kv_pos).clamp(max=table.shape[1] - 1)]
        return torch.where(near, scores + added, scores)

    return modify
