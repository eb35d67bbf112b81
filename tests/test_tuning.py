"""Tunings as data: the shipped table is whole, says what was measured, and is what kernels are launched by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlab.assets import data_path, load_json
from attnlab.bench.trials import SOURCE
from attnlab.bench.workloads import workloads
from attnlab.inspect.resources.shapes import SHAPES
from attnlab.kernels import tuning
from attnlab.kernels.decode import SplitConfig
from attnlab.kernels.decode_latent import LatentConfig
from attnlab.kernels.decode_shares import SharesConfig
from attnlab.kernels.extend import ExtendConfig
from attnlab.kernels.extend_hopper import HopperConfig
from attnlab.kernels.launch import padded
from attnlab.kernels.target import Target
from attnlab.kernels.tuning.checks import check, refused
from attnlab.kernels.tuning.file import parsed, written
from attnlab.kernels.tuning.rows import KERNELS, NUMBERS, Row, Table, completed, names_of
from attnlab.kernels.verify import VerifyConfig
from attnlab.kernels.verify_shares import VerifySharesConfig
from attnlab.plan.tiles import row_tile
from attnlab.spec import AttentionSpec
from tests.tunings import content, fixed

CONFIGS: dict[str, type[Any]] = {
    "decode_split": SplitConfig,
    "decode_shares": SharesConfig,
    "decode_groups": SharesConfig,
    "decode_latent": LatentConfig,
    "verify_split": VerifyConfig,
    "verify_shares": VerifySharesConfig,
    "extend": ExtendConfig,
    "extend_hopper": HopperConfig,
}
INTERPRETER, H200 = Target(kind="interpreter"), Target(kind="cuda", arch=90)
TARGETS = [INTERPRETER, H200, Target(kind="hip"), Target(kind="cuda", arch=80), Target(kind="cuda", arch=100)]
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def spec(heads: int = 32, kv_heads: int = 8, qk_dim: int = 128, v_dim: int = 128, **more: Any) -> AttentionSpec:
    return AttentionSpec(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, scale=0.1, **more)


# --- The shipped table ------------------------------------------------------------------------------------------


def test_the_shipped_table_is_written_as_it_is_read() -> None:
    assert written(tuning.shipped()) == data_path(tuning.FILE).read_text(encoding="utf-8")


def test_every_kernel_has_rows_wherever_it_runs_and_configs_of_its_own_fields() -> None:
    assert CONFIGS.keys() == KERNELS.keys()
    for kernel, config in CONFIGS.items():
        rows = [row for row in tuning.shipped().rows if row.kernel == kernel]
        assert {device for row in rows for device in row.on} >= set(KERNELS[kernel].runs_on)
        assert tuple(field.name for field in fields(config)) == KERNELS[kernel].fields
        assert all(tuple(row.config) == KERNELS[kernel].fields for row in rows)


LLAMA, SMOL, GEMMA, LATENT = spec(), spec(9, 3, 64, 64), spec(8, 4, 256, 256), spec(128, 1, 576, 512)
PAIRS: list[tuple[Callable[[], Any], tuple[int | None, ...]]] = [
    (lambda: SplitConfig.choose(LLAMA, H200, fp32=False), (32, 4, 2)),
    (lambda: SplitConfig.choose(LATENT, H200, fp32=False), (32, 8, 1)),
    (lambda: SplitConfig.choose(spec(8, 8), TARGETS[3], fp32=False), (64, 4, 2)),
    (lambda: SplitConfig.choose(LLAMA, INTERPRETER, fp32=True), (256, 4, 1)),
    (lambda: shares(of=GEMMA), (64, 4, 3)),
    (lambda: shares(dtype=FP32), (32, 8, 2)),
    (lambda: shares(target=TARGETS[2]), (32, 4, 1)),
    (lambda: shares(head_tile=64), (64, 4, 7)),
    (lambda: LatentConfig.choose(H200), (64, 8, 2)),
    (lambda: HopperConfig.choose(GEMMA, H200), (128, 64, 8, 2, None)),
    (lambda: HopperConfig.choose(SMOL, H200), (128, 64, 8, 2, 128)),
    (lambda: verify(rows=12), (16, 128, 4, 3)),
    (lambda: verify(rows=20), (32, 64, 4, 3)),
    (lambda: verify(rows=None), (64, 32, 4, 3)),
    (lambda: verify(rows=12, target=TARGETS[4]), (16, 32, 8, 1)),
    (lambda: verify(rows=48, of=GEMMA), (32, 32, 4, 1)),
    (lambda: verify_shares(rows=16), (16, 128, 4, 5)),
    (lambda: verify_shares(rows=20), (64, 64, 4, 7)),
    (lambda: verify_shares(rows=40), (64, 64, 4, 7)),
    (lambda: verify_shares(rows=20, kv=FP8), (32, 128, 4, 5)),
    (lambda: verify_shares(rows=40, kv=FP8), (64, 64, 4, 5)),
    (lambda: verify_shares(rows=20, masked=True), (32, 64, 4, 5)),
    (lambda: verify_shares(rows=16, of=spec(window=99)), (16, 64, 4, 7)),
    (lambda: verify_shares(rows=64, of=GEMMA, target=INTERPRETER), (32, 64, 4, 1)),
    (lambda: extend(most=None), (128, 64, 8, 3)),
    (lambda: extend(most=16), (16, 64, 4, 3)),
    (lambda: extend(most=None, of=SMOL), (64, 64, 4, 2)),
    (lambda: extend(most=None, of=LATENT, kv=FP8), (16, 32, 8, 1)),
    (lambda: extend(most=999, target=TARGETS[2]), (64, 32, 8, 1)),
]


def shares(*, of: AttentionSpec = LLAMA, target: Target = H200, dtype: torch.dtype = BF16, head_tile: int = 16) -> Any:
    return SharesConfig.choose(of, target, compute=dtype, kv_dtype=dtype, held=4, head_tile=head_tile)


def verify(*, rows: int | None, of: AttentionSpec = LLAMA, target: Target = H200) -> Any:
    return VerifyConfig.choose(of, target, compute=BF16, kv_dtype=BF16, masked=False, rows=rows)


def verify_shares(
    *, rows: int, of: AttentionSpec = LLAMA, target: Target = H200, kv: torch.dtype = BF16, masked: bool = False
) -> Any:
    return VerifySharesConfig.choose(of, target, compute=BF16, kv_dtype=kv, masked=masked, rows=rows)


def extend(*, most: int | None, of: AttentionSpec = LLAMA, target: Target = H200, kv: torch.dtype = BF16) -> Any:
    return ExtendConfig.choose(of, target, compute=BF16, kv_dtype=kv, masked=False, most=most)


@pytest.mark.parametrize(("choose", "expected"), PAIRS, ids=[str(number) for number in range(len(PAIRS))])
def test_known_shapes_have_known_configs(choose: Callable[[], Any], expected: tuple[int | None, ...]) -> None:
    found = choose()
    assert tuple(getattr(found, field.name) for field in fields(found)) == expected


def test_all_shapes_that_are_compiled_have_a_row_on_every_target() -> None:
    for shape in SHAPES:
        for target in TARGETS:
            of, view = shape.spec(), shape.view()
            dtypes = {"compute": shape.dtype, "kv_dtype": view.k.dtype}
            SharesConfig.choose(of, target, **dtypes, held=4, head_tile=16)
            for rows in (1, 64, None):
                ExtendConfig.choose(of, target, **dtypes, masked=shape.masked, most=rows)
                VerifyConfig.choose(of, target, **dtypes, masked=shape.masked, rows=rows)


@given(
    st.integers(1, 700),
    st.integers(1, 700),
    st.sampled_from([BF16, torch.float16, FP32]),
    st.sampled_from([BF16, torch.float16, FP32, FP8]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 600),
    st.integers(1, 5),
    st.sampled_from(TARGETS),
)
def test_no_shape_that_is_drawn_gets_a_config_that_is_refused(
    qk_dim: int, v_dim: int, compute: torch.dtype, kv: torch.dtype, flags: Any, rows: int, held: int, target: Target
) -> None:
    """The check of the table tries one shape of each kind; here any."""
    masked, bounded, modifier = flags
    drawn = {"qk_dim": qk_dim, "v_dim": v_dim, "group": 4, "compute": compute, "kv": kv, "masked": masked}
    drawn |= {"modifier": modifier, "rows": rows, "bounded": bounded, "held": held}
    for kernel in ("decode_split", "decode_shares", "verify_split", "verify_shares", "extend"):
        shape = {word: drawn[word] for word in KERNELS[kernel].words}
        row = tuning.current().row(kernel, target, shape)
        assert refused(row, names_of(target), completed(shape)) is None
    tile = tuning.tuned("verify_shares", target, **{word: drawn[word] for word in KERNELS["verify_shares"].words})
    assert tile["block_m"] <= row_tile(v_dim)
    chosen = VerifyConfig.choose(
        spec(4, 4, qk_dim, v_dim), target, compute=compute, kv_dtype=kv, masked=masked, rows=rows
    )
    assert chosen.block_m <= padded(rows)


def test_every_figure_stands_in_the_run_that_it_is_from() -> None:
    table, known = tuning.shipped(), {work.name for work in workloads()}
    measured = [row for row in table.rows if row.measured is not None]
    assert len(measured) > 10 and {row.measured.run for row in measured if row.measured} == table.runs.keys()
    for row in measured:
        assert row.measured is not None
        run = table.runs[row.measured.run]
        if run.file == SOURCE:
            assert run.commit is not None and row.measured.us.keys() <= known
            continue
        file = run.file.split(",")[0].removeprefix("data/")
        if not file.endswith(".json"):
            text = data_path(file).read_text(encoding="utf-8")
            assert all(f"{us:,.1f}".removesuffix(".0") in text for us in row.measured.us.values()), row.title
            continue
        recorded = load_json(file)
        assert (run.device, run.commit) == (recorded["machine"]["device"], recorded["machine"]["commit"])
        took = {
            (one["name"], round(other["median_us"], 1)) for one in recorded["rows"] for other in one["timed"]
            if other["peer"].startswith("attnlab")
        }  # fmt: skip
        assert set(row.measured.us.items()) <= took, row.title
        assert row.measured.us.keys() <= known


# --- What is refused --------------------------------------------------------------------------------------------


def rows_of(table: Any, kernel: str, on: str = "") -> list[dict[str, Any]]:
    return [row for row in table["rows"] if row["kernel"] == kernel and on in row["on"]]


def breaks(table: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(parsed(table, name="data/tuning.json"), name="data/tuning.json")
    assert words in str(caught.value) and str(caught.value).startswith("data/tuning.json: ")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kernel", "decode", "kernel: expected one of decode_split, decode_shares"),
        ("on", "sm90", "on: expected interpreter, hip, cuda or such as sm_90, got 'sm90'"),
        ("when", "heads = 4", f"expected one of {', '.join(NUMBERS)}, compute, kv before =, got 'heads'"),
        ("when", "rows > 4", "when: shapes of decode_split have qk_dim, group, compute, got 'rows'"),
        ("when", "quick", "expected one of masked, bounded, modifier, or a comparison, got 'quick'"),
        ("when", "group=1", "expected conditions such as 'v_dim <= 128, kv = fp8, not masked', got 'group=1'"),
        ("when", "", "expected conditions such as"),
        ("when", "compute = fp64", "compute: expected one of fp32, fp16, bf16, fp8, got 'fp64'"),
        ("when", "group = one", "group: expected a whole number behind =, got 'one'"),
        ("config", {"block_n": 64, "num_warps": 4}, "config: expected block_n, num_warps, num_stages, got block_n"),
        ("config", {"block_n": 64, "num_warps": 4, "num_stages": None}, "num_stages to be a number from 1 on, got N"),
        ("config", {"block_n": 48, "num_warps": 4, "num_stages": 1}, "block_n: expected a power of two from 16 on"),
        ("config", {"block_n": 64, "num_warps": 3, "num_stages": 1}, "num_warps: expected a power of two up to 32"),
        ("measured", {"run": "h200-decode", "us": {"decode-1x8k": 1.0}}, "expected either measured or unmeasured"),
        ("unmeasured", "", "unmeasured: expected words, got ''"),
        ("speed", "good", "expected config, kernel, measured, on, unmeasured, when, why, got speed"),
    ],
)
def test_a_wrong_row_is_named_with_what_is_wrong(key: str, value: Any, words: str) -> None:
    table = content()
    table["rows"][0][key] = value
    breaks(table, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "yesterday", "us": {"decode-1x8k": 1.0}}, "run: expected one of h200-decode"),
        ({"run": "h200-decode", "us": {}}, "us: expected microseconds of a workload at least"),
        ({"run": "h200-decode", "us": {"decode-1x8k": -1}}, "us: expected microseconds of decode-1x8k, got -1"),
        ({"us": {"decode-1x8k": 1}}, "there is no 'run'"),
    ],
)
def test_a_wrong_measurement_is_named(change: Any, words: str) -> None:
    table = content()
    row = next(row for row in table["rows"] if "measured" in row)
    row["measured"] = change
    breaks(table, words)


def test_a_kernel_without_rows_is_named() -> None:
    table = content()
    table["rows"] = [row for row in table["rows"] if row["kernel"] != "extend"]
    breaks(table, "kernel extend has no row")


@pytest.mark.parametrize(("device", "on"), [("interpreter", "interpreter"), ("cuda", "cuda"), ("hip", "hip")])
def test_a_shape_that_no_row_takes_is_named(device: str, on: str) -> None:
    table = content()
    table["rows"].remove(rows_of(table, "decode_shares", on)[-1])
    breaks(table, f"kernel decode_shares has no row for {device} with qk_dim 1, v_dim 1, compute")


@pytest.mark.parametrize(
    ("when", "on"),
    [("any", "cuda"), ("qk_dim > 300", "cuda"), ("v_dim > 128, v_dim <= 128", "cuda"), ("kv = fp8", "sm_90")],
    ids=["behind any", "a part of an earlier one", "excludes itself", "a part of the device's"],
)
def test_a_row_that_takes_no_shape_is_named(when: str, on: str) -> None:
    table = content()
    last = rows_of(table, "decode_shares", "cuda")[-1]
    at = table["rows"].index(last) + (when in ("any", "kv = fp8"))
    table["rows"].insert(at, {**last, "when": when, "on": on})
    breaks(table, f"decode_shares on {on}: {when}: no shape is left for it")


def test_a_row_that_several_together_leave_nothing_is_named() -> None:
    table = content()
    last = rows_of(table, "decode_shares", "cuda")[-1]
    at = table["rows"].index(last)
    table["rows"][at:at] = [{**last, "when": "v_dim <= 64"}, {**last, "when": "v_dim > 64"}]
    breaks(table, "decode_shares on cuda: any: no shape is left for it")


def test_a_row_where_its_kernel_does_not_run_is_named() -> None:
    table = content()
    table["rows"].append({**rows_of(table, "decode_latent", "sm_90")[0], "on": "sm_80"})
    breaks(table, "decode_latent on sm_80: any: no shape is left for it")


def test_values_narrower_than_tiles_of_keys_are_refused_on_hopper_alone() -> None:
    """Where ptxas 12.8 compiles dots of 64 rows to wrong results, a row is no matter of taste."""
    table = content()
    narrow = next(row for row in rows_of(table, "extend", "sm_90") if row["when"] == "v_dim <= 32")
    narrow["config"] = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    breaks(table, "extend on sm_90: v_dim <= 32: values of 1 columns and 64 rows or more with tiles of 64 keys: ptxas")
    narrow["config"] = {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 2}
    check(parsed(table, name="t"), name="t")
    (large,) = rows_of(table, "decode_groups", "sm_90")
    large["config"]["block_n"] = 128
    breaks(table, "decode_groups on sm_90: any: values of 33 columns and 64 rows or more with tiles of 128 keys: ptxas")


def test_values_that_are_read_as_pairs_are_half_as_wide() -> None:
    table = content()
    few = next(row for row in rows_of(table, "verify_shares", "sm_90") if row["when"] == "rows <= 16")
    few["when"] = "v_dim <= 128"
    few["config"] = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 5}
    narrow = {**few, "when": "v_dim <= 32", "config": {**few["config"], "block_m": 32}}
    table["rows"].insert(table["rows"].index(few), narrow)
    breaks(
        table, "verify_shares on sm_90: v_dim <= 128: values of 33 columns and 64 rows or more with tiles of 64 keys"
    )
    table["rows"].insert(table["rows"].index(few), {**narrow, "when": "kv = fp8, v_dim <= 64"})
    check(parsed(table, name="t"), name="t")


def test_tiles_that_plans_do_not_count_are_refused() -> None:
    table = content()
    rows_of(table, "verify_shares", "cuda")[-1]["config"]["block_m"] = 64
    breaks(table, "verify_shares on cuda, hip: any: block_m: plans count tiles of at most 32 rows")


def test_tiles_of_keys_that_one_pass_cannot_keep_are_refused() -> None:
    table = content()
    rows_of(table, "extend", "cuda")[0]["config"]["block_n"] = 256
    breaks(table, "block_n: one-pass lists begin at multiples of 128 positions, which 256 does not divide")


@pytest.mark.parametrize("damaged", [[], {}, {"about": [], "runs": {}}, {"about": [], "runs": [], "rows": []}, 3])
def test_what_is_no_table_is_named(damaged: Any) -> None:
    breaks(damaged, "")


def test_a_kernel_is_not_asked_about_devices_or_in_words_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="kernel: decode_latent runs on interpreter, sm_90, got a target of hip"):
        LatentConfig.choose(Target(kind="hip"))
    with pytest.raises(ValueError, match="kernel: expected one of decode_split, .* got 'decode'"):
        tuning.tuned("decode", H200)
    with pytest.raises(ValueError, match="shape: extend_hopper has qk_dim, v_dim, in this order, got v_dim, qk_dim"):
        tuning.tuned("extend_hopper", H200, v_dim=3, qk_dim=64)


# --- Another table ----------------------------------------------------------------------------------------------


def other(table: Table, row: Row) -> Table:
    return table.trying(row, {**row.config, "block_n": 16})


def test_another_table_holds_inside_of_its_block() -> None:
    before = LatentConfig.choose(H200)
    row = tuning.current().row("decode_latent", H200, {})
    with pytest.raises(KeyError), tuning.using(other(tuning.current(), row)) as mine:
        assert LatentConfig.choose(H200).block_n == 16
        assert [one.kernel for one in mine.taken] == ["decode_latent"]
        raise KeyError
    assert LatentConfig.choose(H200) == before and tuning.current().rows == tuning.shipped().rows


def test_a_table_does_not_remember_every_length_there_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.kernels.tuning.rows.MOST_TAKEN", 3)
    with tuning.using(fixed()) as table:
        for most in range(1, 9):
            assert extend(most=most).block_m == 16
            assert 1 <= len(table.taken) <= 3


def test_runs_that_no_row_names_are_left_out() -> None:
    table = fixed()
    measured = [row for row in table.rows if row.measured is not None and row.measured.run == "old"]
    for row in measured:
        assert "old" in table.runs
        table = table.trying(row, row.config)
    assert len(measured) > 1 and "old" not in table.runs
    assert parsed(json.loads(written(table)), name="t").rows == table.rows
