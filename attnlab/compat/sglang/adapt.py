"""What foreign objects offer: the one file that looks at them. Everything else gets the plain records made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.checks import describe, one_of, positive, require, tensor, whole
from attnlab.compat.sglang.arguments import INTEGERS
from attnlab.compat.sglang.records import KVWriteLoc, WriteLoc
from attnlab.spec import AttentionSpec, ScoreMod

Translate = Callable[[Tensor], Tensor]
Mode = Literal["decode", "verify", "draft extend", "extend"]


def read(x: Any, path: str) -> Any:
    """Return what a path says, `model_runner.server_args.page_size`, whose first word stands for `x`.

    Raises TypeError, naming what lacks which attribute.
    """
    where, *names = path.split(".")
    for name in names:
        try:
            x = getattr(x, name)
        except AttributeError as error:
            raise TypeError(
                f"{where}: expected an object with {name!r}, got {type(x).__name__} without; the docstring of "
                "TritonAttnBackend lists what is read"
            ) from error
        where = f"{where}.{name}"
    return x


def to_sliding(token_to_kv_pool: Any) -> Translate | None:
    """Return a pool's way from full to sliding slots; None where there is no pool, or it has no sliding storage."""
    translate: Translate | None = getattr(token_to_kv_pool, "translate_loc_from_full_to_swa", None)
    return translate


def to_physical(allocator: Any) -> Translate | None:
    """Return an allocator's way from virtual to physical slots, the dense one where it has one; None without either."""
    dense: Translate | None = getattr(allocator, "translate_kv_loc_dense", None)
    plain: Translate | None = getattr(allocator, "translate_kv_loc", None)
    return plain if dense is None else dense


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runner:
    """What a model runner says of the model, its table of requests, its pool and the server's options.

    `window` is the radius, visible keys minus one; 0 where no layer has a window. `tile`: keys of a split, where set.
    """

    table: Tensor
    pool: Any
    physical: Translate | None
    sliding: Translate | None
    context_len: int
    heads: int
    kv_heads: int
    v_dim: int
    sliding_v_dim: int
    mla: bool
    window: int
    device: torch.device
    gpu: int
    max_splits: int
    tile: int | None
    deterministic: bool
    chunked_prefill: bool
    is_draft: bool
    write_loc: WriteLoc

    @classmethod
    def of(cls, runner: Any, *, tp_size: int, hybrid_linear: bool, write_loc: WriteLoc) -> Runner:
        """Read a model runner.

        Raises ValueError, naming both settings, where they do not go together; TypeError, naming it, where one lacks.
        """

        def option(name: str) -> Any:
            return read(runner, f"model_runner.server_args.{name}")

        config, pool = read(runner, "model_runner.model_config"), read(runner, "model_runner.token_to_kv_pool")
        given = read(runner, "model_runner.req_to_token_pool.req_to_token")
        table = tensor("req_to_token", given, shape=("size", "context"), dtype=torch.int32)
        window = _radius(read(runner, "model_runner.sliding_window_size"))
        encoder = bool(getattr(config, "is_encoder_decoder", False))
        require(
            not (window and encoder),
            f"sliding_window_size, is_encoder_decoder: a window of {window} and an encoder do not go together; set "
            "sliding_window_size=None or use a decoder-only model",
        )
        heads_of = read(runner, "model_runner.model_config.get_max_num_attention_heads")
        heads = positive("get_max_num_attention_heads", heads_of())
        tp = positive("tp_size", tp_size)
        require(heads % tp == 0, f"tp_size: expected a divisor of the {heads} heads, got {tp}")
        kv_heads = positive("get_num_kv_heads", read(runner, "model_runner.model_config.get_num_kv_heads")(tp))
        require(
            (heads // tp) % kv_heads == 0,
            f"get_num_kv_heads: expected a divisor of the {heads // tp} heads of a rank, got {kv_heads}",
        )
        if hybrid_linear:  # whose layer 0 may have no keys
            v_dim = read(runner, "model_runner.token_to_kv_pool.get_v_head_dim")()
        else:
            v_dim = read(runner, "model_runner.token_to_kv_pool.get_value_buffer")(_first_layer(pool)).shape[-1]
        sliding_v_dim = getattr(config, "swa_v_head_dim", None)
        if sliding_v_dim is not None:
            plain_v_dim = read(runner, "model_runner.model_config.v_head_dim")
            v_dim = v_dim if sliding_v_dim == plain_v_dim else plain_v_dim
        for name in ("get_key_buffer", "set_kv_buffer"):  # which layers call
            read(runner, f"model_runner.token_to_kv_pool.{name}")
        tile = option("triton_attention_split_tile_size")
        return cls(
            table=table,
            pool=pool,
            physical=to_physical(getattr(runner, "token_to_kv_pool_allocator", None)),
            sliding=to_sliding(pool),
            context_len=positive("context_len", read(runner, "model_runner.model_config.context_len")),
            heads=heads // tp,
            kv_heads=kv_heads,
            v_dim=positive("v_head_dim", v_dim),
            sliding_v_dim=v_dim if sliding_v_dim is None else positive("swa_v_head_dim", sliding_v_dim),
            mla=_is_mla(read(runner, "model_runner.model_config.attention_arch")),
            window=window,
            device=table.device,
            gpu=getattr(runner, "gpu_id", 0),
            max_splits=positive("triton_attention_num_kv_splits", option("triton_attention_num_kv_splits")),
            tile=None if tile is None else positive("triton_attention_split_tile_size", tile),
            deterministic=bool(option("enable_deterministic_inference")),
            chunked_prefill=option("chunked_prefill_size") not in (None, -1),
            is_draft=bool(getattr(runner, "is_draft_worker", False)),
            write_loc=write_loc,
        )

    def buffers(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values as they are stored."""
        return self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)

    def store(self, layer: Any, where: KVWriteLoc, k: Tensor, v: Tensor, *, mask: Tensor | None) -> None:
        """Write new keys and values. Where there are scales the pool, which may divide in place, gets copies.

        A pool of latent rows divides by no scale: its keys are divided here. A pool that has one place for a token is
        given plain slots, one that has several the record of its own class.
        """
        is_one = where.swa_loc is None and where.full_loc is None
        loc = where.loc if is_one else self.write_loc(where.loc, where.swa_loc, where.full_loc)
        k_scale, v_scale = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
        options = {} if mask is None else {"dcp_kv_mask": mask}
        if k_scale is None or v_scale is None:
            self.pool.set_kv_buffer(layer, loc, k, v, **options)
        elif self.mla:
            self.pool.set_kv_buffer(layer, loc, k / k_scale, v, **options)
        else:
            self.pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), k_scale, v_scale, **options)


def _first_layer(pool: Any) -> int:
    return int(getattr(pool, "start_layer", 0) or 0)


def _radius(size: int | None) -> int:
    """Return a window's radius; 0 for None, -1 and 0, which all say that there is none."""
    radius = 0 if size is None else whole("sliding_window_size", size)
    require(
        radius >= -1, f"sliding_window_size: expected a radius of at least 1, or None, -1 or 0 for none, got {size}"
    )
    return max(radius, 0)


def _is_mla(arch: Any) -> bool:
    return str(getattr(arch, "name", arch)).upper() == "MLA"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What a forward batch says. Lists may be longer than the batch; what is not there is None.

    `known_lens`, `known_prefix`, `known_new`: what the host was told of the batch's `reqs` requests.
    """

    mode: Mode
    reqs: int
    rows: Tensor
    lens: Tensor
    total: int | None
    known_lens: tuple[int, ...] | None
    prefix: Tensor | None
    known_prefix: tuple[int, ...] | None
    new: Tensor | None
    known_new: tuple[int, ...] | None
    out_loc: Tensor | None
    positions: Tensor | None
    encoder: bool
    drafts: int | None
    draft_new: Tensor | None
    mask: Tensor | None
    lists: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, batch: Any) -> Given:
        """Read a forward batch; nothing is read back from the device.

        Where the host is told a total and the lengths too, and they disagree, the larger one sizes the lists. Raises
        ValueError where `seq_lens_cpu` has fewer entries than there are requests.
        """
        reqs, mode = whole("batch_size", read(batch, "forward_batch.batch_size")), mode_of(batch)
        spec = getattr(batch, "spec_info", None)
        require(reqs >= 0, f"batch_size: expected at least 0 requests, got {reqs}")
        known = _on_host("seq_lens_cpu", getattr(batch, "seq_lens_cpu", None), reqs)
        check_known("seq_lens_cpu", known, reqs)
        indptr, indices = getattr(spec, "kv_indptr", None), getattr(spec, "kv_indices", None)
        drafts = getattr(spec, "draft_token_num", None)
        return cls(
            mode=mode,
            reqs=reqs,
            rows=tensor(
                "req_pool_indices", read(batch, "forward_batch.req_pool_indices"), shape=["reqs"], dtype=INTEGERS
            ),
            lens=tensor("seq_lens", read(batch, "forward_batch.seq_lens"), shape=["reqs"], dtype=INTEGERS),
            total=_most(getattr(batch, "seq_lens_sum", None), None if known is None else sum(known)),
            known_lens=known,
            prefix=_integers("extend_prefix_lens", getattr(batch, "extend_prefix_lens", None), "reqs"),
            known_prefix=_on_host("extend_prefix_lens_cpu", getattr(batch, "extend_prefix_lens_cpu", None), reqs),
            new=_integers("extend_seq_lens", getattr(batch, "extend_seq_lens", None), "reqs"),
            known_new=_on_host("extend_seq_lens_cpu", getattr(batch, "extend_seq_lens_cpu", None), reqs),
            out_loc=_integers("out_cache_loc", getattr(batch, "out_cache_loc", None), "tokens"),
            positions=getattr(batch, "positions", None),
            encoder=getattr(batch, "encoder_lens", None) is not None,
            drafts=None if drafts is None or drafts < 1 else int(drafts),
            draft_new=_integers("extend_seq_lens_tensor", getattr(spec, "extend_seq_lens_tensor", None), "reqs"),
            mask=getattr(spec, "custom_mask", None),
            lists=None if indptr is None or indices is None else _lists(indptr, indices),
        )

    @property
    def own_lists(self) -> int:
        """The lists of a step: those that a decode's batch brings, or one a request."""
        if self.mode != "decode" or self.lists is None:
            return self.reqs
        return self.lists[0].shape[0] - 1

    @property
    def prefix_total(self) -> int | None:
        """The cached tokens of an extend, where the host was told: as such, or as what the new ones leave."""
        if self.known_prefix is None:
            return None
        both_known = self.known_lens is not None and self.known_new is not None
        left = sum(self.known_lens or ()) - sum(self.known_new or ()) if both_known else None
        return _most(sum(self.known_prefix), left)


def output_of(batch: Any) -> Tensor | None:
    """Return the buffer that a batch wants its attention in."""
    out: Tensor | None = getattr(batch, "_attn_output", None)
    return out


def write_mask_of(batch: Any) -> Tensor | None:
    """Return which of a batch's tokens are this rank's to store; None where all are."""
    mask: Tensor | None = getattr(batch, "dcp_kv_mask", None)
    return mask


def mode_of(batch: Any) -> Mode:
    """Return the mode of a forward batch: an extend is what none of the others is."""
    if read(batch, "forward_batch.forward_mode.is_decode_or_idle")():
        return "decode"
    if read(batch, "forward_batch.forward_mode.is_target_verify")():
        return "verify"
    return "draft extend" if read(batch, "forward_batch.forward_mode.is_draft_extend_v2")() else "extend"


def _on_host(name: str, lens: Any, reqs: int) -> tuple[int, ...] | None:
    """Return the lengths of the first `reqs` requests, that the host was told; None where it was not."""
    if lens is None:
        return None
    on_cpu = not isinstance(lens, Tensor) or lens.device.type == "cpu"
    require(on_cpu, f"{name}: expected lengths on the CPU, got {describe(lens)}")
    return tuple(int(n) for n in (lens.tolist() if isinstance(lens, Tensor) else lens)[:reqs])


def _integers(name: str, x: Any, axis: str) -> Tensor | None:
    """Return a list of integers, where there is one."""
    return None if x is None else tensor(name, x, shape=[axis], dtype=INTEGERS)


def _lists(indptr: Any, indices: Any) -> tuple[Tensor, Tensor]:
    """Return lists that a batch brings."""
    offsets = tensor("spec_info.kv_indptr", indptr, shape=["rows + 1"], dtype=INTEGERS)
    require(offsets.shape[0] >= 1, "spec_info.kv_indptr: expected at least the entry 0, got none")
    return offsets, tensor("spec_info.kv_indices", indices, shape=["slots"], dtype=INTEGERS)


def check_known(name: str, lens: tuple[int, ...] | None, reqs: int) -> None:
    """Raise ValueError where the host was told the lengths of some requests, but not of all."""
    count = reqs if lens is None else len(lens)
    require(count >= reqs, f"{name}: expected a length for each of {reqs} requests, or None, got {count}")


def _most(*totals: int | None) -> int | None:
    """Return the largest number that is known."""
    known = [int(n) for n in totals if n is not None]
    return max(known) if known else None


def radius_of(layer: Any) -> int:
    """Return the radius of a layer's window, visible keys minus one; 0 where it has none."""
    return _radius(getattr(layer, "sliding_window_size", None))


def is_sliding(layer: Any) -> bool:
    """Whether a layer has a window."""
    return radius_of(layer) > 0


def scales_of(layer: Any) -> tuple[float, float]:
    """Return what a layer's stored keys and values are to be multiplied with: 1 unless both scales exist."""
    scales = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
    if scales[0] is None or scales[1] is None:
        return 1.0, 1.0
    return float(layer.k_scale_float), float(layer.v_scale_float)


def spec_of_layer(layer: Any, *, bidirectional: bool, has_sinks: bool, mod: ScoreMod | None) -> AttentionSpec:
    """Return a layer's attention. Its window's number is a radius: visible keys minus one.

    `bidirectional`: whether decoder layers that ask for it may see tokens behind them. Raises ValueError where the soft
    cap is of another method than tanh, or the temperature's length is 1.
    """
    one_of("logit_capping_method", getattr(layer, "logit_capping_method", None) or "tanh", ("tanh",))
    kind = str(getattr(layer.attn_type, "value", layer.attn_type)).lower()
    cross = bool(getattr(layer, "is_cross_attention", False))
    causal = not cross and kind != "encoder_only" and not (kind == "decoder_bidirectional" and bidirectional)
    radius, cap = radius_of(layer), getattr(layer, "logit_cap", 0.0) or 0.0
    temperature = getattr(layer, "xai_temperature_len", -1)
    require(
        temperature != 1,
        f"layer {layer.layer_id}: xai_temperature_len: expected more than 1 or -1, got 1, whose logarithm is 0",
    )
    return AttentionSpec(
        heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        qk_dim=layer.qk_head_dim,
        v_dim=layer.v_head_dim,
        scale=float(layer.scaling),
        causal=causal,
        window=radius + 1 if radius > 0 else None,
        softcap=float(cap) if cap > 0 else None,
        temperature_len=temperature if temperature is not None and temperature > 0 else None,
        mod=mod,
        has_sinks=has_sinks,
    )
