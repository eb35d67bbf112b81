"""How many splits a list gets: the original's options, and its heuristic where none of them decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.checks import positive, require, tensor
from attnlab.compat.sglang.adapt import Runner
from attnlab.compat.sglang.arguments import INTEGERS
from attnlab.compat.sglang.indices import get_num_kv_splits_triton
from attnlab.engines import Engine
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policy import SplitContext

GFX942_MOST = 256
"""Its 304 compute units would round up to 512, and double the scratch for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Splitting:
    """A list gets at most `most` splits: all of them where `static`, ceil(len / tile) where there is a `tile`."""

    engine: Engine
    heads: int
    kv_heads: int
    most: int
    cores: int
    static: bool
    tile: int | None

    @classmethod
    def of(
        cls, runner: Runner, *, engine: Engine, static: bool, deterministic_tile: int, cores: int | None, kind: str
    ) -> Splitting:
        """Return the rule for a runner; `cores` None asks the device (0, unknown, on a CPU: static splits)."""
        if cores is None:
            on_gpu = runner.device.type == "cuda"
            cores = torch.cuda.get_device_properties(runner.gpu).multi_processor_count if on_gpu else 0
        tile = runner.tile
        if runner.deterministic and tile is None:
            tile = positive("deterministic_split_tile_size", deterministic_tile)
        return cls(
            engine=engine,
            heads=runner.heads,
            kv_heads=runner.kv_heads,
            most=_most(runner, cores, kind) if tile is None else -(-runner.context_len // tile),
            cores=cores,
            static=static and not runner.deterministic,
            tile=tile if runner.deterministic else None,
        )

    def fill(self, counts: Tensor, lens: Tensor) -> None:
        """Fill `counts` int32 `[tokens]` for lists of `lens` `[sequences]`; consecutive tokens share a sequence."""
        tensor("seq_lens", lens, shape=["sequences"], dtype=INTEGERS)
        tensor("num_kv_splits", counts, shape=["tokens"], dtype=torch.int32, device=lens.device)
        tokens, seqs = counts.shape[0], lens.shape[0]
        if seqs == 0:
            return
        group = tokens // seqs
        require(
            group > 0 and group * seqs == tokens,
            f"num_kv_splits: expected a multiple of the {seqs} sequences, got {tokens} query tokens",
        )
        if self.tile is not None:
            counts.copy_((-(-lens // self.tile)).repeat_interleave(group))
        elif self.static or self.cores <= 0:
            counts.fill_(self.most)
        else:
            get_num_kv_splits_triton[(1,)](
                counts,
                lens,
                seqs,
                group,
                self.heads,
                self.kv_heads,
                self.most,
                self.cores,
                MAX_NUM_SEQ=max(256, 1 << (seqs - 1).bit_length()),
                engine=self.engine,
            )


def _most(runner: Runner, cores: int, kind: str) -> int:
    """Return the option; under MLA, whose one KV head needs more splits to fill a device, what the seed policy has."""
    if not runner.mla or cores <= 0 or kind == "xpu":
        return runner.max_splits
    context = SplitContext(
        heads=runner.heads,
        kv_heads=runner.kv_heads,
        v_dim=runner.v_dim,
        mla=True,
        context_len=runner.context_len,
        multiprocessors=cores,
    )
    most = Seed(max_splits=runner.max_splits).cap(context)
    return min(most, GFX942_MOST) if kind == "hip" else most
