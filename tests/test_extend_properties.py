"""What extend must satisfy whatever is drawn: agreement with the oracle, and what must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from attnlab._boot import INTERPRETED
from attnlab._triton import jit, tl
from attnlab.spec import ScoreMod
from tests.cases import ENGINES
from tests.extend_cases import Case, Part, Stand
from tests.strategies import extend_cases
from tests.tolerances import LSE, output

Property = Callable[[Case, str, str], None]


def holds(
    of: Callable[[Case], Case] = lambda case: case, *, times: int = 1
) -> Callable[[Property], Callable[[str, str], None]]:
    """Make a test for each engine of a property of drawn cases, changed by `of`; kernels get fewer and smaller ones."""

    def made(body: Property) -> Callable[[str, str], None]:
        @pytest.mark.parametrize(("engine", "device"), ENGINES, ids=[name for name, _ in ENGINES])
        def test(engine: str, device: str) -> None:
            few, all_of_them = settings().max_examples // 16, settings().max_examples * 2 // 5

            @settings(max_examples=times * (all_of_them if engine == "eager" else few))
            @given(case=extend_cases(small=INTERPRETED and engine == "triton").map(of))
            def drawn(case: Case) -> None:
                body(case, engine, device)

            drawn()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return made


def assert_same_bits(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other), f"off by up to {(mine - other).abs().max()}"


def assert_same_sums(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], case: Case, engine: str) -> None:
    """The same bits; of compiled kernels, which have other tiles where a modifier or a mask comes, the same numbers."""
    if engine == "eager" or INTERPRETED:
        assert_same_bits(got, want)
    else:
        assert_close(got, want, case)


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], case: Case) -> None:
    torch.testing.assert_close(got[0], want[0], **output(case.dtype, case.softcap))
    torch.testing.assert_close(got[1], want[1], **LSE)


def rows_of(parts: list[Part], result: tuple[Tensor, Tensor], case: Case) -> tuple[Tensor, Tensor]:
    """The rows of these tokens in the result of the whole case."""
    out, lse = (x.split(case.new) for x in result)
    rows = [(r, slice(first - case.prefix[r], last - case.prefix[r])) for r, first, last in parts]
    return torch.cat([out[r][some] for r, some in rows]), torch.cat([lse[r][some] for r, some in rows])


@holds(times=5)
def test_what_is_drawn_agrees_with_the_oracle(case: Case, engine: str, device: str) -> None:
    Stand(case, engine, device).check()


@holds()
def test_requests_in_another_order_give_the_same_bits(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    order = torch.randperm(len(case.new), generator=torch.Generator().manual_seed(case.placement)).tolist()
    turned = case.but(prefix=tuple(case.prefix[r] for r in order), new=tuple(case.new[r] for r in order))
    got = Stand(turned, engine, device, stand.inputs.pick(order)).run()
    assert_same_bits(got, rows_of([stand.parts[r] for r in order], stand.run(), case))


@holds(lambda case: case.but(mla=False))
def test_groups_equal_heads_of_their_own_that_repeat(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    k, v = ([x.repeat_interleave(stand.spec.group, 1) for x in side] for side in (stand.inputs.k, stand.inputs.v))
    repeated = Stand(case.but(kv_heads=case.heads), engine, device, replace(stand.inputs, k=k, v=v))
    assert_close(repeated.run(), stand.run(), case)


@jit
def _three_more_triton(
    scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width
):  # type: ignore[no-untyped-def]
    return scores + 3.0


@jit
def _as_it_was_triton(
    scores, q_pos, kv_pos, q_index, head, valid, aux_ptr, aux_stride_token, aux_stride_head, aux_width
):  # type: ignore[no-untyped-def]
    return scores + 0.0 * (q_pos - kv_pos).to(tl.float32)


THREE_MORE = ScoreMod(
    name="three more", torch=lambda scores, *_: scores + 3.0, triton=_three_more_triton, needs_aux=False
)
AS_IT_WAS = ScoreMod(
    name="as it was",
    torch=lambda scores, q_pos, kv_pos, *_: scores + 0.0 * (q_pos - kv_pos),
    triton=_as_it_was_triton,
    needs_aux=False,
)


@holds(lambda case: case.but(mod=None))
def test_a_constant_added_to_all_scores_changes_the_lse_alone(case: Case, engine: str, device: str) -> None:
    plain = Stand(case, engine, device)
    sinks = None if plain.inputs.sinks is None else plain.inputs.sinks + 3.0
    more = Stand(case.but(mod=THREE_MORE), engine, device, replace(plain.inputs, sinks=sinks))
    out, lse = plain.run()
    assert_close(more.run(), (out, lse + 3.0), case)


def assert_neutral(case: Case, engine: str, device: str, aux: list[Tensor] | None = None, **change: Any) -> None:
    plain = Stand(case.but(mod=None), engine, device)
    aux = None if aux is None else [x.to(plain.device) for x in aux]
    changed = Stand(plain.case.but(**change), engine, device, replace(plain.inputs, aux=aux))
    assert_same_sums(changed.run(), plain.run(), plain.case, engine)


@holds()
def test_a_modifier_that_adds_nothing_changes_no_bit(case: Case, engine: str, device: str) -> None:
    assert_neutral(case, engine, device, mod=AS_IT_WAS)


@holds()
def test_a_bias_of_zeros_changes_no_bit(case: Case, engine: str, device: str) -> None:
    zeros = [torch.zeros(n, case.heads, 16) for n in case.new]
    assert_neutral(case, engine, device, zeros, mod="relative_bias")


@holds(lambda case: case.but(temperature_len=None))
def test_a_temperature_from_the_longest_request_on_changes_no_bit(case: Case, engine: str, device: str) -> None:
    assert_neutral(case, engine, device, temperature_len=max(2, *case.lens))


def _unmasked(case: Case) -> Case:
    """Causality decides; what is new is stored as it came, so that it does not matter whether it is read back."""
    return case.but(mask=None, causal=True, read_back=False, kv_dtype=case.dtype, k_scale=0.5, v_scale=0.5)


@holds(_unmasked)
def test_extend_then_decode_equals_the_last_row_of_a_longer_extend(case: Case, engine: str, device: str) -> None:
    stand = Stand(case, engine, device)
    some = [part for part in stand.parts if part[1] < part[2]]
    assume(some)
    stand.step([(r, first, last - 1) for r, first, last in some])
    newest = [(r, last - 1, last) for r, _, last in some]
    whole = Stand(case, engine, device).run()
    assert_close(stand.decode(newest), rows_of(newest, whole, case), case)


@holds(_unmasked)
def test_a_prompt_in_chunks_equals_the_whole(case: Case, engine: str, device: str) -> None:
    chunked, whole = Stand(case, engine, device), Stand(case, engine, device).run()
    cuts = [p + n * (r + 1) // (len(case.new) + 1) for r, (p, n) in enumerate(zip(case.prefix, case.new, strict=True))]
    front = [(r, first, cut) for (r, first, _), cut in zip(chunked.parts, cuts, strict=True)]
    back = [(r, cut, last) for (r, _, last), cut in zip(chunked.parts, cuts, strict=True)]
    for parts in (front, back):
        assert_close(chunked.step(parts), rows_of(parts, whole, case), case)


def _seeing_all(case: Case) -> Case:
    return case.but(window=None, chunk=None, pool="plain" if case.pool == "window" else case.pool)


@holds(_seeing_all)
def test_a_window_as_long_as_the_request_gives_the_bits_of_seeing_all(case: Case, engine: str, device: str) -> None:
    """Causal or not, under any mask."""
    window = max(1, *case.lens) + case.placement % 3
    assert_same_bits(Stand(case.but(window=window), engine, device).run(), Stand(case, engine, device).run())


@holds(_seeing_all)
def test_a_chunk_as_long_as_the_request_gives_the_bits_of_seeing_all(case: Case, engine: str, device: str) -> None:
    """Causal or not, under any mask."""
    chunk = max(1, *case.lens) + case.placement % 3
    assert_same_bits(Stand(case.but(chunk=chunk), engine, device).run(), Stand(case, engine, device).run())


@holds()
def test_where_tokens_lie_changes_no_bit(case: Case, engine: str, device: str) -> None:
    """Neither their slots, nor the size of pages, nor the pool."""
    want = Stand(case, engine, device).run()
    for pool in ("plain", "unified"):
        size, place = case.page_size % 5 + 1, case.placement + 1
        elsewhere = case.but(placement=place, page_size=size, pool=pool, layout="slots")
        assert_same_bits(Stand(elsewhere, engine, device).run(), want)


@holds(lambda case: case.but(mask=None, causal=True))
def test_a_causal_mask_gives_the_bits_of_causality(case: Case, engine: str, device: str) -> None:
    causal = Stand(case, engine, device)
    bits = [torch.ones(n, p + n, dtype=torch.bool).tril(diagonal=p) for p, n in zip(case.prefix, case.new, strict=True)]
    masked = Stand(case.but(mask="random"), engine, device, replace(causal.inputs, bits=bits))
    assert_same_sums(masked.run(), causal.run(), case, engine)


@holds(lambda case: case.but(one_pass=False, read_back=False))
def test_cached_and_new_keys_merged_by_their_lse_are_the_whole(case: Case, engine: str, device: str) -> None:
    """The sink, which the parts leave out, joins once, after the merge."""
    stand = Stand(case.but(dtype=torch.float32), engine, device)
    sinks = stand.inputs.sinks
    (cached, c), (new, n) = (_attended(stand, parts) for parts in ("cached", "new"))
    lse = torch.logaddexp(c, n) if sinks is None else torch.logaddexp(torch.logaddexp(c, n), sinks.float())
    shares = [torch.where(x == -math.inf, 0.0, (x - lse).exp())[..., None] for x in (c, n)]
    assert_close((cached * shares[0] + new * shares[1], lse), stand.run(), stand.case)


def _attended(stand: Stand, parts: Literal["cached", "new"]) -> tuple[Tensor, Tensor]:
    """Output and LSE over some of the keys."""
    plan, (q, k, v) = stand.backend.plan(stand.batch), stand.new()
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    out = torch.full((*lse.shape, v.shape[2]), float("nan"), dtype=q.dtype, device=q.device)
    options = {"aux": stand.aux(stand.parts), "out": out, "lse": lse, "parts": parts}
    stand.backend.extend(1, q, k, None if stand.case.mla else v, plan, **options)
    return out, lse


@holds(lambda case: case.but(mask=None, read_back=True))
def test_to_decode_it_is_all_one_whether_a_layer_is_causal(case: Case, engine: str, device: str) -> None:
    causal = Stand(case.but(causal=True), engine, device)
    newest = [(r, n - 1, n) for r, n in enumerate(case.lens) if case.new[r]]
    assume(newest)
    assert_same_bits(Stand(case.but(causal=False), engine, device).decode(newest), causal.decode(newest))
