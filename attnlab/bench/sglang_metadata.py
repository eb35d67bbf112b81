"""What SGLang's kernels take to prepare a decode step. Their files come from a folder: nothing is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.checks import require

SGLANG_FILES = {"create_flashinfer_kv_indices_triton": "kv_indices.py", "get_num_kv_splits_triton": "metadata.py"}
"""The kernels of a decode step's metadata in SGLang 0.5.23, in `sglang/kernels/ops/attention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangMetadata:
    """What SGLang does once a decode step: offsets, the index list, the split counts."""

    kernels: dict[str, Any]
    table: Tensor
    rows: Tensor
    lens: Tensor
    heads: int
    kv_heads: int
    max_splits: int
    multiprocessors: int

    @staticmethod
    def kernels_of(folder: Path) -> dict[str, Any]:
        """Return the kernels out of a folder that holds SGLang's files. Raises ValueError where they are not there."""
        kernels = {}
        for kernel, file in SGLANG_FILES.items():
            path = folder / file
            require(path.is_file(), f"sglang: expected {file} in {folder}, got {sorted(folder.glob('*'))[:8]}")
            spec = spec_from_file_location(f"sglang_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise ValueError(f"sglang: {path} cannot be imported")
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            kernels[kernel] = vars(module)[kernel]
        return kernels

    def step(self) -> Callable[[], None]:
        """Return the step over buffers that are allocated once, as in a graph."""
        reqs, device = self.rows.shape[0], self.rows.device
        indptr = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
        indices = torch.empty(self.table.shape[1] * reqs, dtype=torch.int64, device=device)
        counts = torch.empty(reqs, dtype=torch.int32, device=device)
        gather, count = (self.kernels[name] for name in SGLANG_FILES)
        lanes = max(256, 1 << (reqs - 1).bit_length())

        def run() -> None:
            indptr[1:] = torch.cumsum(self.lens, dim=0)
            gather[(reqs,)](self.table, self.rows, self.lens, indptr, None, indices, self.table.stride(0))
            count[(1,)](
                counts,
                self.lens,
                reqs,
                1,
                self.heads,
                self.kv_heads,
                self.max_splits,
                self.multiprocessors,
                MAX_NUM_SEQ=lanes,
            )

        return run
