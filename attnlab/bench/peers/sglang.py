"""SGLang's Triton kernels over the same pool: those of an installed package, or of a folder with its files.

Written against SGLang 0.5.23, whose `sglang/kernels/ops/attention` the folder is. Of the rest of SGLang these files ask
which device there is and how options are set: of files alone it is CUDA, and every option is off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnlab.bench.inputs import Inputs, offsets, tree_mask
from attnlab.bench.peer import Call, Peer, Setting, imported, one_line, peer, unusual
from attnlab.bench.workload import Workload
from attnlab.checks import require
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policy import SplitContext

HOME = "sglang.kernels.ops.attention"
FILES = ("decode_attention", "extend_attention", "verify_splitkv")
STATIC = (4, 8, 16, 32, 64, 128)
"""Split counts among which its best static one is looked for."""
MOST_PARTIALS_BYTES = 4 << 30


class Kernels:
    """The functions of SGLang that are called here; `problem` says why there are none."""

    def __init__(self, setting: Setting) -> None:
        self.problem, self._modules = "", dict[str, ModuleType]()
        if setting.device.type != "cuda":
            self.problem = "runs on a GPU alone"
        elif setting.sglang is not None:
            self._from_files(setting.sglang)
        else:
            self._from_package()

    def __getitem__(self, name: str) -> Any:
        """Return a function by its name."""
        return next(vars(module)[name] for module in self._modules.values() if name in vars(module))

    def _from_package(self) -> None:
        for file in FILES:
            module, self.problem = imported(f"{HOME}.{file}")
            if module is None:
                self.problem += "; --sglang takes a folder with its kernels' files"
                return
            self._modules[file] = module

    def _from_files(self, folder: Path) -> None:
        for file in FILES:
            there = [path.name for path in sorted(folder.glob("*.py"))][:8]
            require((folder / f"{file}.py").is_file(), f"sglang: expected {file}.py in {folder}, got {there}")
        try:
            with _stand_ins(folder):
                self._modules = {file: import_module(f"{HOME}.{file}") for file in FILES}
        except Exception as error:  # of whatever type: these files are not ours
            self.problem = f"its files cannot be imported: {one_line(error)}"


class _Off:
    """Every option, off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def get(self) -> bool:
        """Return the value of an option."""
        return False


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Let SGLang's kernel files be imported from a folder, without the rest of SGLang."""
    made = {}
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", HOME, "sglang.srt"):
        made[name] = ModuleType(name)
        made[name].__path__ = [str(folder)] if name == HOME else []
    device = ModuleType("sglang.srt.utils")
    vars(device).update({name: lambda: False for name in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported")})
    vars(device).update({"is_cuda": lambda: True, "get_device_core_count": _multiprocessors})
    options = ModuleType("sglang.srt.environ")
    vars(options)["envs"] = _Off()
    before = dict(sys.modules)
    sys.modules.update({**made, device.__name__: device, options.__name__: options})
    try:
        yield
    finally:  # whoever imports SGLang later gets SGLang
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] == "sglang"})


def _multiprocessors(device: int = 0) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Sglang:
    """Its defaults: split counts by its heuristic, extends and verifies by its extend kernel.

    `best`: the best of its static split counts instead, and of a verify its split-KV kernel.
    """

    def __init__(self, kernels: Kernels, *, best: bool) -> None:
        self.best, self.kernels = best, kernels

    def declines(self, work: Workload) -> str | None:
        """Decline without its kernels, and what its defaults do already."""
        if self.kernels.problem:
            return self.kernels.problem
        what = unusual(work, but=("sinks", "soft cap", "temperature", "window", "tree", "fp8 keys", "MLA"))
        if what is not None:
            return f"its Triton kernels have no {what}"
        if self.best and work.mode in ("extend", "unified"):
            return "it has one way to extend, which sglang is"
        if self.best and work.mode == "verify":
            what = unusual(work, but=("fp8 keys",))
            return None if what is None else f"its split-KV verify has no {what}"
        return None

    def calls(self, inputs: Inputs) -> list[Call]:
        """Return its one way, or one for each static split count that its scratch has room for."""
        match inputs.work.mode:
            case "decode":
                return self._decodes(inputs)
            case "extend" | "verify":
                return [self._extend(inputs)]
            case "unified":
                return [self._unified(inputs)]

    def _decodes(self, inputs: Inputs) -> list[Call]:
        work, spec = inputs.work, inputs.work.attention
        row = work.requests * spec.heads * (spec.v_dim + 1) * 4
        if self.best:
            longest = max(work.cached)
            fit = [n for n in STATIC if n * row <= MOST_PARTIALS_BYTES and n * 32 <= longest] or [1]
            counts = [(n, torch.full((work.requests,), n, dtype=torch.int32, device=inputs.device)) for n in fit]
            return [self._decode(inputs, most, count, f"{most} splits") for most, count in counts]
        context = SplitContext(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            v_dim=spec.v_dim,
            mla=work.mla,
            context_len=max(work.cached),
            multiprocessors=inputs.multiprocessors,
        )
        seen = inputs.listed(new=False)[0].diff().int()
        policy = Seed()
        return [self._decode(inputs, policy.cap(context), policy.counts(seen, context), "")]

    def _decode(self, inputs: Inputs, most: int, counts: Tensor, variant: str) -> Call:
        work, spec, view = inputs.work, inputs.work.attention, inputs.pool.view(0)
        indptr, slots = inputs.listed(new=False)
        out = inputs.output()
        partial = torch.empty(work.requests, spec.heads, most, spec.v_dim, device=inputs.device)
        lse = torch.empty(work.requests, spec.heads, most, device=inputs.device)
        function = self.kernels["decode_attention_fwd"]

        def run() -> Tensor:
            function(
                inputs.q,
                view.k,
                view.v,
                out,
                indptr,
                slots,
                partial,
                lse,
                counts,
                most,
                spec.scale,
                1.0,
                1.0,
                logit_cap=spec.softcap or 0.0,
                sinks=inputs.sinks,
                xai_temperature_len=spec.temperature_len or -1,
                has_mla=work.mla,
            )
            return out

        return Call(run=run, variant=variant)

    def _extend(self, inputs: Inputs) -> Call:
        work, spec, view = inputs.work, inputs.work.attention, inputs.pool.view(0)
        indptr, slots = inputs.listed(new=False)
        mask, mask_indptr = _mask(inputs)
        split = work.mode == "verify" and self.best
        function = self.kernels["verify_splitkv_fwd" if split else "extend_attention_fwd"]
        new = inputs.k
        values = inputs.v if inputs.v is not None or new is None else new[..., : spec.v_dim]
        more = {"max_bs": work.requests} if split else {}
        out, asked = inputs.output(), offsets([work.new] * work.requests, inputs.device)

        def run() -> Tensor:
            took = function(
                inputs.q,
                new,
                values,
                out,
                view.k,
                view.v,
                asked,
                indptr,
                slots,
                mask,
                True,
                mask_indptr,
                work.new,
                1.0,
                1.0,
                sm_scale=spec.scale,
                logit_cap=spec.softcap or 0.0,
                sliding_window_size=-1 if spec.window is None else spec.window - 1,
                sinks=inputs.sinks,
                xai_temperature_len=spec.temperature_len or -1,
                **more,
            )
            require(took is not False, "verify_splitkv_fwd does not take this shape", NotImplementedError)
            return out

        return Call(run=run, variant="split-KV verify" if split else "extend" if work.mode == "verify" else "")

    def _unified(self, inputs: Inputs) -> Call:
        work, spec, view = inputs.work, inputs.work.attention, inputs.pool.view(0)
        indptr, slots = inputs.listed(new=True)
        function = self.kernels["extend_attention_fwd_unified"]
        cached = torch.tensor(work.cached, dtype=torch.int32, device=inputs.device)
        out, asked = inputs.output(), offsets([work.new] * work.requests, inputs.device)

        def run() -> Tensor:
            function(
                inputs.q,
                out,
                view.k,
                view.v,
                1.0,
                1.0,
                asked,
                indptr,
                slots,
                cached,
                work.new,
                sm_scale=spec.scale,
                logit_cap=spec.softcap or 0.0,
                is_causal=True,
                sliding_window_size=-1 if spec.window is None else spec.window - 1,
                sinks=inputs.sinks,
                xai_temperature_len=spec.temperature_len or -1,
            )
            return out

        return Call(run=run)


def _mask(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Return a tree's mask over cached and new keys as bytes, and where each request's begins."""
    work = inputs.work
    if not work.tree:
        return None, None
    own = tree_mask(work.tree)
    rows = [torch.cat([own.new_ones(work.new, n), own], dim=1).flatten() for n in work.cached]
    return torch.cat(rows).to(inputs.device).to(torch.uint8), offsets([len(x) for x in rows], inputs.device).long()


@peer("sglang")
def sglang(setting: Setting) -> Peer:
    """Return SGLang as it is by default."""
    return Sglang(Kernels(setting), best=False)


@peer("sglang-best")
def sglang_best(setting: Setting) -> Peer:
    """Return SGLang with the best static split count, which a server does not know."""
    return Sglang(Kernels(setting), best=True)
