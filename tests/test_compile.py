"""Every kernel variant compiles for four GPUs that are not here; the table in the repository says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import _triton
from attnlab.assets import data_path
from attnlab.inspect.resources import FOR_HOPPER, TABLE, TARGETS

pytestmark = pytest.mark.skipif(_triton.PROBLEM is not None, reason="needs Triton")


@pytest.fixture(scope="module")
def compiled(compiling: dict[str, str]) -> str:
    """The table, made in a process of its own."""
    command = [sys.executable, "-m", "attnlab.inspect.resources"]
    done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def rows(table: str) -> dict[str, str]:
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return {line.split("|")[1].strip(): line for line in lines}


OF_HOPPER = ("a multiprocessor", "heads a program", "states kept")
"""How names end of what is compiled for Hopper alone, where other targets' text would say nothing new."""


def test_every_variant_compiles_for_every_target(compiled: str) -> None:
    for name, row in rows(compiled).items():
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        assert len(cells) == len(TARGETS)
        for target, cell in zip(TARGETS, cells, strict=True):
            unreadable = "fp8" in name and target in ("sm_80", "gfx942")
            hopper_alone = FOR_HOPPER in name or name.startswith("latent") or name.endswith(OF_HOPPER)
            of_another = hopper_alone and target != "sm_90"
            assert (cell == "-") == (unreadable or of_another), f"{name} on {target}: {cell}"


def test_the_table_in_the_repository_is_up_to_date(compiled: str) -> None:
    kept = Path(data_path(TABLE)).read_text().strip()
    same_triton = f"Triton {_triton.triton.__version__}." in kept
    if same_triton:
        assert compiled == kept, "run `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources --write`"
    else:
        assert rows(compiled).keys() == rows(kept).keys()


SPILLS = {
    **dict.fromkeys(("extend: gqa 2 x 256 (Gemma)", "extend: gqa 2 x 256, window, cap (Gemma-2)"), 8),
    "extend in one pass: gqa 4 x 128 (Llama-3)": 8,
    "split: gqa 4 x 128, fp32": 8,
    "split: mla 20 x 288/256, fp32": 24,
    "extend: mla 128 x 576/512, fp32": 700,
    "verify: mla 128 x 576/512, fp32": 700,
    "verify shares: gqa 4 x 128, window (Mistral), 64 rows": 64,
    "latent: mla 128 x 576/512 (DeepSeek-V3)": 40,
    **dict.fromkeys(
        (
            "extend for Hopper: gqa 4 x 128 (Llama-3)",
            "extend for Hopper: gqa 4 x 128, fp16",
            "extend for Hopper: gqa 4 x 128, pages of 16",
            "extend for Hopper: mha 128 (OLMo-2)",
            "extend in one pass for Hopper: gqa 4 x 128 (Llama-3), pages of 64",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "extend for Hopper: gqa 4 x 128, window (Mistral)",
            "extend for Hopper: gqa 4 x 128 (Llama-3), pages of 64",
            "extend for Hopper: gqa 6 x 128, cap, temperature (Grok)",
            "extend for Hopper: mha 96 (Phi-3)",
            "extend for Hopper: mha 80 (StableLM)",
        ),
        48,
    ),
    "extend for Hopper: gqa 4 x 128 (Llama-3), gathered": 8,
    "extend for Hopper: gqa 5 x 128, chunk, temperature (Llama-4)": 168,
}
"""Bytes a thread that may spill. Gemma: tiles that need two words less in registers take twice the time. In one pass:
on sm_100, where nobody has timed anything yet. fp32 serves for checking; MLA in fp32 does not fit a gfx942.
Latent rows, verify over even shares: none in a loop over keys; what lies around it gives way to the accumulator, and
to drafts that are loaded ahead. Extend for Hopper: a few bytes buy a second program on each multiprocessor, which is
worth twice the rate; with boxes they are spilled outside of the loops over keys."""


def test_no_variant_spills(compiled: str) -> None:
    """Spilled registers go through slow memory."""
    for name, row in rows(compiled).items():
        spills = [int(cell.split("/")[1]) for cell in row.split("|")[2:-1] if "/" in cell]
        assert max(spills) <= SPILLS.get(name, 0), f"{name}: {row}"


TIMED = """
from attnlab.inspect import resources
from attnlab.inspect.resources.one_query import split_variant
target = resources.TARGETS["sm_90"]
for timed in (False, True):
    taken = resources.compile_variant(split_variant(resources.GQA, target, timed=timed), "sm_90")
    print(taken.registers, taken.spills)
"""


def test_times_cost_a_multiprocessor_none_of_its_programs(compiling: dict[str, str]) -> None:
    """Registers are handed out by eights: of 64 a multiprocessor holds eight programs of four warps, of 72 seven."""
    done = subprocess.run([sys.executable, "-c", TIMED], env=compiling, capture_output=True, text=True, check=True)
    plain, timed = done.stdout.splitlines()
    assert timed == plain


MERGES = """
from attnlab.inspect import resources
from attnlab.inspect.resources.one_query import merge_variant
for shape in (resources.GQA, resources.NARROW):
    print(resources.compile_variant(merge_variant(shape, resources.TARGETS["sm_90"], shared_ranges=2), "sm_90").shared)
"""


def test_programs_of_a_merge_of_few_ranges_take_little_room(compiling: dict[str, str]) -> None:
    """They are launched while a split's hold most of a multiprocessor's 228 KB: 32 of them fit, of one KB more each."""
    done = subprocess.run([sys.executable, "-c", MERGES], env=compiling, capture_output=True, text=True, check=True)
    assert all(0 < (int(shared) + 1024) * 32 <= 228 * 1024 for shared in done.stdout.split()), done.stdout


SERIALIZED = """
from attnlab.inspect import resources
models = ("(Llama-3)", "(Gemma)", "(DeepSeek-V3)")
for variant in resources.variants(resources.TARGETS["sm_90"]):
    if resources.FOR_HOPPER in variant.name and any(model in variant.name for model in models):
        print(variant.name, resources.serialized(variant))
"""


def test_tensor_core_instructions_do_not_wait_for_each_other(compiling: dict[str, str]) -> None:
    """As they would where registers run out: found by reading what ptxas says, not by timing."""
    command = [sys.executable, "-c", SERIALIZED]
    done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=True)
    answers = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert {name.split(FOR_HOPPER)[0] for name in answers} == {
        "extend",
        "extend in one pass",
        "latent",
        "verify shares",
    }, answers
    assert len(answers) >= 5 and set(answers.values()) == {"False"}, answers


LOOPS = """
from collections import Counter
from attnlab.inspect import resources
words = ("fma.rn.f32", "mul.f32", "add.f32", "sub.f32", "max.f32", "ex2.approx")
for variant in resources.variants(resources.TARGETS["sm_90"]):
    one_pass = variant.name.startswith("extend in one pass" + resources.FOR_HOPPER)
    more = ("extend for Hopper: gqa 4 x 128, window", "extend for Hopper: gqa 4 x 128 (Llama-3)")
    if one_pass or variant.name.startswith(more):
        lines = resources.ptx(variant).splitlines()
        scores = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line and "m64n64" in line]
        values = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line and "m64n128" in line]
        for last in [i for i in scores if not any(i < other < min(v for v in values if v > i) for other in scores)]:
            step = lines[last : min(v for v in values if v > last)]
            print(*[sum(word in line for line in step) for word in words])
"""


def test_tiles_with_and_without_masks_are_attended_by_the_same_arithmetic(compiling: dict[str, str]) -> None:
    """B40: in one pass a tile is seen whole after one cut of a prompt and in part after another, with the same bits."""
    command = [sys.executable, "-c", LOOPS]
    done = subprocess.run(command, env=compiling, capture_output=True, text=True, check=True)
    loops = done.stdout.splitlines()
    assert len(loops) >= 2 * 2 + 6 + 3 * 4 and len(set(loops)) == 1, loops
    assert all(int(count) > 0 for count in loops[0].split()), loops


PDL = """
from attnlab.inspect import resources
for variant in resources.variants(resources.TARGETS["sm_90"]):
    kind = variant.name.split(":")[0]
    kinds = ("split", "merge", "verify", "verify shares", "verify shares for Hopper", "verify merge")
    if kind in kinds and "(Llama-3)" in variant.name:
        lines = resources.ptx(variant).splitlines()
        at = lambda word: [i for i, line in enumerate(lines) if word in line]
        merges = "merge" in kind
        first, last = map(at, ("griddepcontrol.wait", "ld.global") if merges else ("st.global", "launch_dependents"))
        print(kind, bool(first) and (first[0] < last[0] if merges else first[-1] < last[-1]))
"""


def test_a_merge_waits_for_its_split(compiling: dict[str, str]) -> None:
    """Programmatic dependent launch: nothing is read before the wait, nothing stored after the release."""
    done = subprocess.run([sys.executable, "-c", PDL], env=compiling, capture_output=True, text=True, check=False)
    kinds = {"split True", "merge True", "verify True", "verify shares True", "verify merge True"}
    kinds.add("verify shares for Hopper True")
    assert {line.split(",")[0] for line in done.stdout.splitlines()} == kinds, done.stdout + done.stderr[-2000:]


LANES = """
from attnlab.inspect import resources
for variant in resources.variants(resources.TARGETS["sm_90"]):
    if variant.name.split(":")[0] in ("count sizes", "count shares", "write lane"):
        lines = resources.ptx(variant).splitlines()
        at = lambda *words: [i for i, line in enumerate(lines) if any(word in line for word in words)]
        (wait,), touched = at("griddepcontrol.wait"), at("ld.global", "st.global")
        released = at("launch_dependents")
        print(variant.name, wait < min([*touched, *released]))
"""


def test_a_lanes_kernels_wait_before_they_touch_anything(compiling: dict[str, str]) -> None:
    """They are launched early: what they read may still be written, and what they write still be read."""
    done = subprocess.run([sys.executable, "-c", LANES], env=compiling, capture_output=True, text=True, check=False)
    answers = done.stdout.splitlines()
    assert len(answers) == 6 and all(line.endswith(" True") for line in answers), done.stdout + done.stderr[-2000:]
