"""Explorers without a browser: controls change the picture, arguments make the same, errors name what is known."""

import ast
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnlab import explore_merge, explore_splits, split_policies, split_policy
from attnlab.explore.explorer import MOST_CONTROLS, WIDGET_VIEW, Explorer, _literal
from attnlab.explore.splits import parameter_of
from attnlab.plots.style import THEMES

LENS = [4096, 900, 17, 2300]

MADE: dict[str, Callable[..., Explorer]] = {
    "splits": lambda **more: explore_splits(**{"policy": "tile", "compare": "seed", "lens": LENS, **more}),
    "merge": lambda **more: explore_merge(**{"lens": [600, 0, 90], **more}),
}

CHANGES = [
    ("splits", "policy", "static"),
    ("splits", "parameter", 1024),
    ("splits", "compare", ""),
    ("splits", "compare", "static"),
    ("splits", "batch", ("azure_llm_2023_code", 1)),
    ("merge", "layer", 0),
    ("merge", "head", 5),
    ("merge", "request", 2),
    ("merge", "splits", 4),
]


@pytest.fixture
def halves() -> Iterator[str]:
    """A policy as a notebook would register one: plain Python, without a parameter, and with a bug at 17 keys."""

    @split_policy("halves-of-a-test", needs_host_lens=True, max_ranges=2)
    def halves(lens: list[int], ctx: object) -> list[list[tuple[int, int]]]:
        if 17 in lens:
            raise ZeroDivisionError("<b>seventeen</b>")
        return [[(0, n // 2), (n // 2, n)] if n > 1 else [(0, n)] * n for n in lens]

    yield halves.name
    del split_policies._items[halves.name], split_policies._owners[halves.name]


def again(explorer: Explorer) -> Explorer:
    """Run the explorer's own cell, and return what it makes."""
    scope: dict[str, Any] = {}
    exec(explorer.code(), scope)
    made: Explorer = scope["explorer"]
    return made


def seen(explorer: Explorer) -> str:
    """Return what the front end is given to show."""
    return str(explorer.widget.children[2].value)


# --- Controls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "control", "value"), CHANGES)
def test_a_control_changes_picture_words_and_state(kind: str, control: str, value: object) -> None:
    explorer = MADE[kind]()
    before = explorer.picture.to_svg(), explorer.words, explorer.state, seen(explorer)
    explorer.controls[control].value = value
    after = explorer.picture.to_svg(), explorer.words, explorer.state, seen(explorer)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert after[0] in after[3]


@pytest.mark.parametrize(("kind", "control", "value"), CHANGES)
def test_the_code_cell_makes_the_same_state_and_picture(kind: str, control: str, value: object) -> None:
    explorer = MADE[kind]()
    explorer.controls[control].value = value
    same = again(explorer)
    assert same.state == explorer.state
    assert same.words == explorer.words
    assert same.picture.to_svg() == explorer.picture.to_svg()


@pytest.mark.parametrize("kind", MADE)
def test_the_state_is_the_arguments(kind: str) -> None:
    explorer = MADE[kind](theme="dark")
    made = {"splits": explore_splits, "merge": explore_merge}[kind](**explorer.state)
    assert made.state == explorer.state
    assert explorer.state["theme"] == "dark"


@pytest.mark.parametrize("kind", MADE)
def test_few_controls_each_with_a_class(kind: str) -> None:
    explorer = MADE[kind]()
    assert len(explorer.controls) <= MOST_CONTROLS
    for name, control in explorer.controls.items():
        assert f"attnlab-{name}" in control.get_state()["_dom_classes"]


def test_a_policy_brings_its_own_parameter_at_the_published_value() -> None:
    explorer = explore_splits(policy="tile", tile=512, lens=LENS)
    assert explorer.state["tile"] == 512
    explorer.controls["policy"].value = "static"
    assert explorer.state["splits"] == 8
    assert "tile" not in explorer.state
    assert 32 in [value for _, value in explorer.controls["parameter"].options]


def test_one_change_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, drawn = explore_splits(lens=LENS), []
    look = explorer._look
    monkeypatch.setattr(explorer, "_look", lambda state: drawn.append(state) or look(state))
    explorer.controls["policy"].value = "tile"
    assert len(drawn) == 1


def test_a_value_between_the_steps_is_a_step() -> None:
    assert explore_splits(policy="tile", tile=300, lens=LENS).state["tile"] == 300
    assert explore_merge(splits=7).state["splits"] == 7
    assert explore_splits(seed=41).state["seed"] == 41


def test_a_policy_compared_with_itself_is_seen_once() -> None:
    alone, beside = (explore_splits(policy="tile", compare=name, lens=LENS) for name in (None, "tile"))
    assert alone.picture.to_svg() == beside.picture.to_svg()
    assert explore_splits(policy="tile", tile=512, compare="tile", lens=LENS).words.count("tile") == 2


def test_lengths_and_draws_are_one_batch_control() -> None:
    explorer = explore_splits(lens=LENS)
    assert explorer.state["lens"] == LENS
    explorer.controls["batch"].value = ("azure_llm_2023_code", 2)
    assert (explorer.state["trace"], explorer.state["seed"]) == ("azure_llm_2023_code", 2)
    assert "lens" not in explorer.state
    explorer.controls["batch"].value = ""
    assert explorer.state["lens"] == LENS


@pytest.mark.parametrize("lens", [[], [0, 0], [0, 5]])
def test_batches_with_little_in_them_are_shown(lens: list[int]) -> None:
    assert explore_splits(lens=lens, compare="tile").picture.title


@pytest.mark.parametrize("model", ["SmolLM2-135M", "DeepSeek-V3", "Gemma-2-9b"])
def test_a_model_gives_the_heads(model: str) -> None:
    assert explore_splits(lens=LENS, model=model, multiprocessors=None).state["model"] == model


# --- Policies of a notebook ---------------------------------------------------------------------------------------


def test_a_policy_without_a_parameter_is_offered_too(halves: str) -> None:
    explorer = explore_splits(policy=halves, lens=[100, 9], compare="tile")
    assert explorer.controls["parameter"].disabled
    assert parameter_of(halves) is None
    assert again(explorer).state == explorer.state
    explorer.controls["policy"].value = "tile"
    assert not explorer.controls["parameter"].disabled


def test_what_a_policy_raises_is_said_and_the_picture_stays(halves: str) -> None:
    explorer = explore_splits(lens=LENS)
    before = explorer.state, explorer.picture, seen(explorer)
    explorer.controls["policy"].value = halves
    assert "ZeroDivisionError:</b> &lt;b&gt;seventeen" in explorer.widget.children[1].value
    assert before == (explorer.state, explorer.picture, seen(explorer))
    explorer.controls["policy"].value = "tile"
    assert explorer.state["policy"] == "tile"
    assert "ZeroDivisionError" not in explorer.widget.children[1].value


def test_a_policy_that_cannot_even_be_made_is_said_too(halves: str) -> None:
    def broken() -> None:
        raise ZeroDivisionError("no policy")

    explorer = explore_splits(lens=[100, 9])
    before = explorer.picture
    split_policies._items[halves] = type("Broken", (), {"__init__": lambda self: broken()})
    explorer.controls["policy"].value = halves
    assert "ZeroDivisionError:</b> no policy" in explorer.widget.children[1].value
    assert explorer.picture is before


def test_a_slider_waits_until_it_is_let_go() -> None:
    sliders = [explore_splits(lens=LENS).controls["parameter"], explore_merge().controls["splits"]]
    assert not any(slider.continuous_update for slider in sliders)


def test_policies_are_known_in_a_fresh_process() -> None:
    program = "import attnlab; print(*attnlab.split_policies.names())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["balanced", "seed", "static", "tile"]


# --- Errors -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: explore_splits(policy="tiles"), ValueError, "policy: expected one of .*tile.*, got 'tiles'"),
    (lambda: explore_splits(compare="nothing"), ValueError, "compare: expected one of .*seed"),
    (lambda: explore_splits(policy="tile", max_splits=4), TypeError, "'max_splits' is no argument of .*parameter is"),
    (
        lambda: explore_splits(polcy="tile"),
        TypeError,
        "'polcy' is no argument of policy 'seed'; its parameter is max_s",
    ),
    (lambda: explore_splits(policy="tile", tile=0), ValueError, "tile: expected at least 1, got 0"),
    (lambda: explore_splits(policy="tile", tile="8"), TypeError, "tile: expected an int, got '8'"),
    (lambda: explore_splits(lens=[3], trace="azure_llm_2023_code"), ValueError, "either given or drawn"),
    (lambda: explore_splits(trace="azure"), ValueError, "trace: expected one of azure_llm_2023_conv, "),
    (lambda: explore_splits(seed=-1), ValueError, "seed: expected an int of at least 0"),
    (lambda: explore_splits(requests=0), ValueError, "requests: expected at least 1"),
    (lambda: explore_splits(lens=[-3]), ValueError, "expected 0 to"),
    (lambda: explore_splits(model="Llama"), ValueError, "Llama-3.1-8B"),
    (lambda: explore_splits(multiprocessors=0), ValueError, "multiprocessors: expected at least 1"),
    (lambda: explore_splits(multiprocessors=True), TypeError, "multiprocessors: expected an int, got True"),
    (lambda: explore_splits(multiprocessors=1.5), TypeError, "multiprocessors: expected an int, got 1.5"),
    (lambda: explore_splits(lens=5), TypeError, "lens: expected a list of lengths, one per request, got 5"),
    (lambda: explore_splits(theme="blue"), ValueError, "theme: expected one of light, dark"),
    (lambda: explore_merge(layer=1), ValueError, "layer: the recorded sample has layers 0, 18, 23, got 1"),
    (lambda: explore_merge(head=9), ValueError, "head: the layer has heads 0 to 8, got 9"),
    (lambda: explore_merge(request=3), ValueError, "request: requests with keys are 0, 1, 2, got 3"),
    (lambda: explore_merge(lens=[]), ValueError, "request: requests with keys are none"),
    (lambda: explore_merge(lens=[4000]), ValueError, "the recorded text 2,048"),
    (lambda: explore_merge(splits=0), ValueError, "splits: expected at least 1"),
    (lambda: explore_merge(theme="blue"), ValueError, "theme: expected one of light, dark"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_an_error_names_what_is_known(number: int) -> None:
    call, kind, words = WRONG[number]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("text", ["seed", 'a "b"', "a\\n\x00\x7f", "😀", "é", "\ud800", "\u2028"])
def test_the_code_of_a_text_is_that_text(text: str) -> None:
    assert ast.literal_eval(_literal(text)) == text
    assert _literal("seed") == '"seed"'


# --- What leaves the explorer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_the_notebook_gets_a_live_widget_and_a_picture_that_outlives_it(kind: str) -> None:
    explorer = MADE[kind]()
    bundle = explorer._repr_mimebundle_()
    assert bundle[WIDGET_VIEW]["model_id"] == explorer.widget.model_id
    assert bundle["image/svg+xml"] == explorer.picture.to_svg()
    assert explorer.words in bundle["text/plain"]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("kind", MADE)
def test_what_is_shown_has_its_own_paper_and_no_script_or_address(kind: str, theme: str) -> None:
    shown = seen(MADE[kind](theme=theme))
    assert THEMES[theme].paper.lower() in shown.lower()
    assert "<script" not in shown
    assert set(re.findall(r"https?://[^\"\s]+", shown)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_redraw_times_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """CPU time, printed, and held to a bound that only a rebuilt workbench or a runaway figure would break."""
    explorers = {"splits": explore_splits(compare="tile"), "merge": explore_merge()}
    moves: dict[str, list[tuple[str, object]]] = {
        "splits": [("parameter", 4), ("policy", "static"), ("parameter", 64), ("batch", ("azure_llm_2023_conv", 1))],
        "merge": [("head", 5), ("request", 1), ("splits", 32), ("layer", 0), ("request", 0), ("layer", 18)],
    }
    for kind, explorer in explorers.items():
        times = []
        for control, value in moves[kind]:
            start = time.process_time()
            explorer.controls[control].value = value
            times.append(time.process_time() - start)
        with capsys.disabled():
            listed = ", ".join(f"{1000 * t:.0f}" for t in times)
            print(f"\nredraw of explore_{kind}: {listed} ms, {len(seen(explorer)):,} bytes", end="")
        assert sorted(times)[len(times) // 2] < 1.0


def test_garbage_is_collected_again_after_a_redraw_also_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = explore_splits(lens=[100], policy="tile")
    assert gc.isenabled()
    seen: list[bool] = []

    def fails(state: dict[str, Any]) -> Any:
        seen.append(gc.isenabled())
        raise ValueError("no picture")

    monkeypatch.setattr(explorer, "_look", fails)
    explorer.controls["parameter"].value = 512
    assert seen == [False] and gc.isenabled()
