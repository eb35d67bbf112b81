"""Charts of a notebook's own numbers: what they say, how they look, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import matplotlib
import pytest
from matplotlib.colors import to_hex

from attnlab.plots import style
from attnlab.plots.chart import MARKERS, chart, plain
from attnlab.plots.picture import Picture
from tests.test_plots import faults

SIZES = [8, 16, 32, 64, 128, 256]
SIX = {f"policy {i}, launched": [(i + 1) * 8 * n**1.5 for n in SIZES] for i in range(6)}


def made(*panels: Any, **changes: Any) -> Picture:
    words = {"title": "Programs grow", "xlabel": "requests captured", "ylabel": "programs", **changes}
    return chart(SIZES, *(panels or (SIX,)), **words)


PICTURES = {
    "one": made(log="xy"),
    "linear": made(),
    "two": made(SIX, {"alone": [1e-9] * 6}, panel_titles=("Left", "Right"), ylabel=("keys", "MiB"), log="x"),
    "tiny": made({"error": [3e-8] * 6, "rounding": [1e-7] * 6}, log="xy", ylim=(1e-9, 1e-3)),
}
every_picture = pytest.mark.parametrize("name", PICTURES)


@pytest.mark.parametrize(("theme", "fonts"), [("light", style.FONTS), ("dark", style.FONTS[-1:])])
@every_picture
def test_no_text_collides_or_leaves_the_canvas(
    name: str, theme: str, fonts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "FONTS", fonts)
    assert not faults(PICTURES[name].figure(theme))


@pytest.mark.parametrize("theme", style.THEMES)
def test_lines_are_seen_on_their_paper_and_differ_in_more_than_colour(theme: str) -> None:
    ax = PICTURES["one"].figure(theme).axes[0]
    lines, paper = ax.get_lines(), style.THEMES[theme].paper
    assert all(style.contrast(to_hex(line.get_color()), paper) >= style.SEEN for line in lines)
    looks = [{str(x) for x in (line.get_color(), line.get_marker(), line.get_linestyle())} for line in lines]
    assert [line.get_marker() for line in lines] == list(MARKERS) and len({*map(frozenset, looks)}) == len(lines)
    assert to_hex(ax.get_facecolor()) == paper.lower()


def test_numbers_are_written_out_and_a_linear_axis_begins_at_0() -> None:
    svg = PICTURES["one"].to_svg()
    assert all(f">{n}<" in svg for n in SIZES) and ">16,384<" in svg and "mathdefault" not in svg
    assert PICTURES["linear"].figure().axes[0].get_ylim()[0] == 0
    assert ">1e-9<" in PICTURES["tiny"].to_svg()


def test_numbers_that_differ_in_two_digits_have_labels_that_differ() -> None:
    numbers = [digits * 10.0**power / 10 for power in range(-9, 6) for digits in range(10, 100)]
    assert len({plain(x) for x in numbers}) == len(numbers)
    assert [plain(x) for x in (999.4, 999.5, 999.9, -1234.5)] == ["999", "1,000", "1,000", "-1,234"]
    assert [plain(x) for x in (0.0015, 0.0024, 9.99e-4, -1.25e-12)] == ["0.0015", "0.0024", "9.99e-4", "-1.25e-12"]
    assert [plain(x) for x in (float("nan"), float("inf"))] == ["nan", "inf"]


@pytest.mark.parametrize("values", [[3, -5, 4, 2, 1, 0], [-3, -5, -4, -2, -1, -3], [2] * 6])
def test_a_linear_axis_has_0_and_every_value(values: list[float]) -> None:
    low, high = made({"gain": values}).figure().axes[0].get_ylim()
    assert low <= min(0, *values) and high >= max(0, *values)


def test_an_axis_of_x_that_is_logarithmic_refuses_0() -> None:
    words = {"title": "From none on", "xlabel": "drafts", "ylabel": "keys"}
    with pytest.raises(
        ValueError, match="x: it has 0, which has no place on a logarithmic x axis; leave 'x' out of log='x'"
    ):
        chart([0, 1], {"line": [1, 2]}, log="x", **words)
    assert chart([0, 1], {"line": [1, 2]}, log="y", **words).alt == "keys by drafts. line: 1 at 0, 2 at 1."


def test_the_words_have_the_ends_of_every_line() -> None:
    picture = PICTURES["two"]
    assert picture.title == "Programs grow"
    assert picture.alt.startswith("Left: keys by requests captured. policy 0, launched: 181 at 8, 32,768 at 256. ")
    assert picture.alt.endswith("Right: MiB by requests captured. alone: 1e-9 at 8, 1e-9 at 256.")


def test_settings_of_ones_own_stay() -> None:
    before = dict(matplotlib.rcParams)
    made(theme="dark").to_png()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("panels", "changes", "words"),
    [
        ([{"short": [1, 2]}], {}, "panels: line 'short' has 2 values for 6 of x"),
        ([SIX] * 3, {}, "panels: expected 1 or 2 dicts of lines, got 3"),
        ([], {"log": "z"}, "log: expected x, y or xy, got 'z'"),
        ([], {"title": " "}, "title: expected a sentence"),
        ([], {"panel_titles": ("a", "b")}, "panel_titles: expected 1, one for each panel, got 2"),
        ([SIX | {"seventh": SIZES}], {}, "panels: expected at most 6 lines in each, more look alike, got 7"),
        (
            [SIX, {"gap": [1, 2, 0, 4, 5, 6]}],
            {"log": "y"},
            "panels: line 'gap' has 0, which has no place on a logarithmic y axis",
        ),
        ([{"gain": [1, 2, -0.5, 4, 5, 6]}], {"log": "xy"}, "panels: line 'gain' has -0.5, which has no place on a"),
        ([], {"log": "y", "ylim": (0, 9)}, "ylim: it has 0, which has no place on a logarithmic y axis"),
        ([], {"ylabel": ["a", "b"]}, "ylabel: expected 1, one for each panel, got 2"),
        ([], {"theme": "blue"}, "theme: expected one of light, dark"),
    ],
)
def test_what_is_no_chart_is_refused(panels: list[Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        made(*panels, **changes)
