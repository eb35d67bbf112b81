"""Pictures: titles are true, files stand alone, text is legible, colours can be told apart, and no batch breaks one."""

import inspect
import re
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from itertools import combinations
from threading import Event, Thread

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnlab.batch import DecodeBatch, HostLens
from attnlab.inspect.footprint import Footprint
from attnlab.inspect.merge import MergeSteps
from attnlab.inspect.page_map import PageMap
from attnlab.inspect.workbench import workbench
from attnlab.plan.index import KVIndex
from attnlab.plan.layout import KVLayout
from attnlab.plan.plans import DecodePlan, Lane
from attnlab.plan.policies.seed import Seed
from attnlab.plan.policies.static import Static
from attnlab.plan.policies.tile import Tile
from attnlab.plan.policy import SplitContext, SplitPolicy
from attnlab.plan.schedule import Schedule
from attnlab.plan.splits import HostSplits, offsets_of, splits_of_sizes
from attnlab.plots import style
from attnlab.plots.attention import attention
from attnlab.plots.cells import fill
from attnlab.plots.key_axis import KeyAxis
from attnlab.plots.lse_merge import lse_merge
from attnlab.plots.merge_view import MergeView
from attnlab.plots.picture import Picture
from attnlab.plots.schedule_panel import Panel, box_pitch
from attnlab.plots.schedule_view import ScheduleView, cut_view, schedule_views
from attnlab.plots.show import Show, show
from attnlab.plots.split_schedule import split_schedule
from attnlab.spec import AttentionSpec, ModelSpec

SKEWED = (1020, 3267, 188, 2394, 126_195, 396, 13_203, 1130, 964, 4089, 22_648, 6909)
MANY = tuple(1 + (7919 * i * i) % 9000 for i in range(64))
EVEN = tuple(30 * i for i in range(64))


def lane(policy: SplitPolicy, lens: tuple[int, ...], *, kv_heads: int = 8) -> Lane:
    """Return a lane of a batch that nobody has the keys of: pictures look at the integers alone."""
    device = torch.tensor(lens, dtype=torch.int32)
    ctx = SplitContext(
        heads=4 * kv_heads, kv_heads=kv_heads, v_dim=64, mla=False, context_len=1 << 21, multiprocessors=132
    )
    bounds = policy.bounds(bound_max=max(lens, default=0), ctx=ctx)
    sizes = policy.sizes(device, ctx)
    splits = splits_of_sizes(sizes, device, policy=policy.name, bounds=bounds, total=sum(lens))
    slots = torch.zeros(sum(lens), dtype=torch.int64)
    return Lane(
        layout=KVLayout.full(KVIndex(indptr=offsets_of(device), slots=slots, space="pool")),
        splits=splits,
        schedule=Schedule.one_range_a_program(splits, kv_heads=kv_heads),
        write_slots=torch.zeros(len(lens), dtype=torch.int64),
    )


def merge(lse: list[float], *, size: int = 32, dim: int = 8, request: int = 0) -> MergeSteps:
    """Return a merge of splits that are so loud; their partial outputs grow longer and turn."""
    generator = torch.Generator().manual_seed(len(lse))
    outputs = torch.randn(len(lse), dim, generator=generator, dtype=torch.float64)
    return MergeSteps(
        layer=0,
        request=request,
        head=0,
        ranges=tuple((size * i, size * (i + 1)) for i in range(len(lse))),
        lse=torch.tensor(lse, dtype=torch.float64),
        outputs=outputs * torch.linspace(0.2, 3.0, len(lse), dtype=torch.float64)[:, None],
    )


def bumpy(count: int) -> list[float]:
    """Return LSEs with ups and downs, and a loud first split."""
    return [6.0] + [float(3 * np.sin(1.7 * i) - 2) for i in range(1, count)]


ODD_NAME = HostSplits(
    policy="a $very$ odd_name & <long> one, of the kind that only a notebook's cell brings forth",
    ranges=(((0, 5), (5, 9)), ((0, 100),), ()),
    nominal=(2, 1, 0),
)
PICTURES = {
    "skewed": lambda: show(lane(Seed(), SKEWED)),
    "compared": lambda: show(lane(Seed(), SKEWED), lane(Tile(), SKEWED)),
    "three": lambda: show(*(lane(Static(splits=n), SKEWED[:5]) for n in (1, 4, 40))),
    "rounded": lambda: show(lane(Static(), (257, 10, 0, 64, 33, 200))),
    "no request": lambda: show(lane(Seed(), ())),
    "no key": lambda: show(lane(Seed(), (0, 0, 0))),
    "one key": lambda: show(lane(Seed(), (1,))),
    "one request": lambda: show(lane(Seed(), (2048,))),
    "a million": lambda: show(lane(Seed(max_splits=64), (1_000_000, 12, 300)), lane(Tile(), (1_000_000, 12, 300))),
    "equal ranges": lambda: show(lane(Static(splits=20), (640, 20))),
    "ties": lambda: show(lane(Tile(), EVEN), lane(Static(splits=2), EVEN)),
    "24 requests": lambda: show(lane(Seed(), MANY[:24])),
    "25 requests": lambda: show(lane(Tile(), MANY[:25])),
    "4,096 requests": lambda: show(lane(Seed(), MANY * 64)),
    "odd name": lambda: show(ODD_NAME, ODD_NAME),
    "device": lambda: show(
        *schedule_views(lane(Seed(), SKEWED), name="seed, cap 8", multiprocessors=132, head_tiles=2)
    ),
    "merge of 1": lambda: show(merge([1.5])),
    "merge of one key": lambda: show(merge([1.5], size=1)),
    "merge of 2": lambda: show(merge([-12.25, 0.5])),
    "merge of 8": lambda: show(merge(bumpy(8)), merge([1.0] * 8)),
    "merge of 12": lambda: show(merge(bumpy(12)), merge([-20.0] + [3.0] * 11)),
    "merge of 64": lambda: show(merge(bumpy(64)), merge(bumpy(22))),
    "merge of 300": lambda: show(merge(bumpy(300))),
}


@cache
def svg_of(name: str, theme: str = "light") -> str:
    """Return a picture as SVG, drawn once for all tests."""
    return PICTURES[name]().to_svg(theme=theme)


every_picture = pytest.mark.parametrize("name", PICTURES)


def digits(text: str) -> list[float]:
    """Return the numbers in a sentence."""
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*", text)]


# ---------------------------------------------------------------- titles


def test_the_title_of_one_schedule_is_true():
    title = show(lane(Seed(), SKEWED)).title
    sizes = [end - start for mine in lane(Seed(), SKEWED).splits.to_host().ranges for start, end in mine]
    count, longest, ratio = digits(title)
    assert (count, longest) == (len(sizes), max(sizes))
    assert ratio == pytest.approx(max(sizes) / (sum(sizes) / len(sizes)), abs=0.05)


def test_the_title_compares_with_an_even_share_where_the_device_is_known():
    (view,) = schedule_views(lane(Seed(), SKEWED), multiprocessors=132, head_tiles=1)
    count, longest, ratio, multiprocessors = digits(show(view).title)
    assert multiprocessors == 132
    assert ratio == pytest.approx(longest * 132 / (sum(SKEWED) * 8), abs=0.05)
    (fine,) = schedule_views(lane(Tile(), SKEWED), multiprocessors=132, head_tiles=1)
    assert "within an even share" in show(fine).title
    assert sum(SKEWED) * 8 >= 256 * 132


def test_the_title_of_two_schedules_compares_their_longest_ranges():
    title = show(lane(Tile(), SKEWED), lane(Seed(), SKEWED)).title
    assert title == "The longest range holds 15,776 keys under seed and 256 under tile, a factor of 62"
    assert max(b - a for mine in lane(Seed(), SKEWED).splits.to_host().ranges for a, b in mine) == 15_776
    assert round(15_776 / 256) == 62


@pytest.mark.parametrize(
    ("views", "title"),
    [
        ([lane(Seed(), ())], "There is no request in the batch, so there is nothing to read"),
        ([lane(Seed(), (0, 0))], "No request in the batch has a key, so there is nothing to read"),
        ([lane(Static(splits=1), (7,))], "Under static one range holds all 7 keys: nothing is cut"),
        ([lane(Static(splits=1), (1,))], "Under static one range holds the only key: nothing is cut"),
        ([lane(Seed(), (2048,))], "Under seed each of 8 ranges holds 256 keys"),
        (
            [lane(Tile(), (2048, 255))],
            "Under tile the longest of 9 ranges holds 256 keys, hardly more than the average",
        ),
        (
            [lane(Seed(), (257,)), lane(Static(), (257,))],
            "The longest range holds 64 keys under seed and static alike",
        ),
        (
            [lane(Static(splits=n), (4096,)) for n in (1, 2, 4)],
            "The longest range holds from 1,024 keys under static (3) to 4,096 under static (1), a factor of 4.0",
        ),
    ],
)
def test_titles_of_particular_batches(views, title):
    assert show(*views).title == title


def ranges_of(sizes: list[list[int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return ranges of so many keys, for each request."""
    return tuple(
        tuple(zip(ends[:-1], ends[1:], strict=True)) for ends in (np.cumsum([0, *mine]).tolist() for mine in sizes)
    )


def view_of(sizes: list[list[int]]) -> ScheduleView:
    """Return a schedule of such ranges."""
    return ScheduleView(name="mine", ranges=ranges_of(sizes), nominal=tuple(map(len, sizes)))


@given(st.lists(st.lists(st.integers(1, 300), max_size=6), max_size=5))
def test_the_title_never_understates_the_longest_range(sizes):
    view = view_of(sizes)
    everything = [size for mine in sizes for size in mine]
    title = split_schedule(view).title
    if everything == [1]:
        assert "the only key" in title
    elif everything:
        assert plural_keys(max(everything)) in title or plural_keys(sum(everything)) in title
        assert ("the longest of" in title) == (len(set(everything)) > 1)
    else:
        assert "nothing to read" in title


def plural_keys(count: int) -> str:
    return f"{count:,} key" + ("" if count == 1 else "s")


@pytest.mark.parametrize("last", [2.5, 5.0])
def test_the_title_of_a_merge_is_true(last):
    steps = merge([4.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.5, last])
    title = show(steps).title
    weights = torch.softmax(steps.lse, 0)
    partial = (weights[:, None] * steps.outputs).cumsum(0) / weights.cumsum(0)[:, None]
    distance = (partial - partial[-1]).norm(dim=1) / partial[-1].norm()
    split, weight, off, until = digits(title)
    assert split == 1 + weights.argmax()
    assert weight == pytest.approx(100 * weights.max(), abs=0.5)
    assert off == pytest.approx(100 * distance[int(until) - 2], abs=0.5)
    assert (distance[int(until) - 1 :] <= 0.10).all()
    assert ("yet" in title) == (until != split)


def test_one_key_is_not_many():
    picture = show(merge([1.5], size=1))
    assert picture.title == "One split holds the only key, so there is nothing to merge"
    assert ">split (1 key)<" in picture.to_svg()


def test_a_merge_without_a_heavy_split_does_not_claim_one():
    steps = merge([0.0] * 5)
    assert show(steps).title.startswith("The heaviest of 5 splits holds 20% of the weight; the answer is ")


def test_two_merges_are_titled_by_the_surprise_or_else_compared():
    loud, even = merge([4.0, 0.0, 1.0, 2.5]), merge([0.0] * 4)
    assert show(even, loud).title.startswith("Right: split 1 holds ")
    assert show(even, even).title == "The heaviest split holds 25% of the weight on the left and on the right"


def test_a_merge_of_zero_outputs_says_so_instead_of_dividing_by_zero():
    steps = replace(merge([0.0, 0.0]), outputs=torch.zeros(2, 4))
    picture = show(steps)
    assert picture.title.endswith("the answer is zero")
    assert "no share of it is defined" in picture.to_svg()


def test_a_masked_split_is_absent_and_the_others_keep_their_numbers():
    view = MergeView.of(merge([2.0, float("-inf"), 1.0]))
    assert (view.number, view.keys) == ((1, 3), (32, 32))
    assert view.weight.sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="every score is masked"):
        show(merge([float("-inf")]))


def test_a_merge_with_masked_splits_does_not_speak_of_all():
    hidden = float("-inf")
    picture = show(merge([hidden, 2.0, hidden]))
    assert picture.title == "Only split 2 of 3 has a key that is not masked, so there is nothing to merge"
    assert "32 keys in 1 split, 2 more masked" in picture.alt
    assert show(merge([hidden, *[1.0] * 4])).title.startswith("The heaviest of 4 splits that see a key holds 25%")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lse": torch.zeros(3)}, r"lse: expected \[2\] float64 or float32, got \[3\]"),
        ({"lse": torch.zeros(2).half()}, r"lse: expected \[2\] float64 .*, got \[2\] float16"),
        ({"outputs": torch.zeros(2, dtype=torch.float64)}, r"outputs: expected \[2, v_dim\]"),
        ({"ranges": ((0, 5), (5, 5))}, r"ranges: expected some keys in each, got \[\(5, 5\)\]"),
    ],
)
def test_steps_that_are_none_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(merge([0.0, 1.0]), **changes)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (((-5, 5),), r"request 0: range \[-5, 5\) overlaps"),
        (((5, 0),), "leaves a gap"),
        (((0, 0),), "holds no key"),
        (((0, 5), (6, 7)), "leaves a gap"),
        (((0, 5), (3, 7)), "overlaps"),
    ],
)
def test_ranges_that_cut_no_request_are_refused(mine, message):
    for kind in ({"policy": "x"}, {"name": "x"}):
        make = HostSplits if "policy" in kind else ScheduleView
        with pytest.raises(ValueError, match=f"policy 'x': .*{message}"):
            make(ranges=(mine,), nominal=(1,), **kind)
    with pytest.raises(ValueError, match="nominal: expected a number for each of 1 requests, got 2"):
        HostSplits(policy="x", ranges=(((0, 5),),), nominal=(1, 1))


# ---------------------------------------------------------------- exports


@every_picture
def test_an_svg_stands_alone(name):
    picture, svg = PICTURES[name](), svg_of(name)
    root = ElementTree.fromstring(svg)
    assert (root[0].text, root[1].text) == (picture.title, picture.alt)
    assert root.get("aria-label") == f"{picture.title}. {picture.alt}"
    assert "<metadata" not in svg and "<!DOCTYPE" not in svg and "<style" not in svg
    assert set(re.findall(r'(\S+)="https?://', svg)) <= {"xmlns", "xmlns:xlink"}
    assert svg.count("http") == len(re.findall(r'xmlns(?::xlink)?="http', svg))
    assert len(svg) < 120_000


@every_picture
def test_an_svg_has_no_id_but_those_that_it_refers_to(name):
    ids = re.findall(r' id="([^"]*)"', svg_of(name))
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(re.findall(r'(?:href="|url\()#([^")]*)', svg_of(name)))


def test_ids_differ_from_picture_to_picture():
    some = [("compared", "light"), ("compared", "dark"), ("merge of 8", "light"), ("24 requests", "light")]
    ids = [i for name, theme in some for i in re.findall(r' id="([^"]*)"', svg_of(name, theme))]
    assert len(set(ids)) == len(ids) > 10


@pytest.mark.parametrize("name", ["compared", "merge of 8", "24 requests", "odd name"])
def test_an_svg_is_the_same_each_time(name):
    assert PICTURES[name]().to_svg() == svg_of(name)


def test_a_page_holds_both_themes_and_needs_no_network():
    picture = PICTURES["compared"]()
    page = picture.to_html()
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")).find("body") is not None
    assert svg_of("compared", "light") in page and svg_of("compared", "dark") in page
    assert "prefers-color-scheme: dark" in page
    outside = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//|@import|<script|<link|url\((?!#)|src=", outside)


def test_files_hold_what_the_methods_return_without_a_path(tmp_path):
    picture, (svg, html, png) = PICTURES["merge of 2"](), (tmp_path / name for name in ("a.svg", "a.HTM", "a"))
    assert (picture.to_svg(svg), picture.to_html(str(html)), picture.to_png(png, dpi=50)) == (svg, html, png)
    assert svg.read_bytes().decode() == picture.to_svg()
    assert html.read_bytes().decode() == picture.to_html()
    assert png.read_bytes() == picture.to_png(dpi=50)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_a_path_that_cannot_be_meant_is_refused(kind, tmp_path):
    write = getattr(PICTURES["merge of 2"](), f"to_{kind}")
    with pytest.raises(ValueError, match=f"^to_{kind}: writes {kind.upper()}, but 'x.jpg' ends in '.jpg'"):
        write(tmp_path / "x.jpg")
    with pytest.raises(FileNotFoundError, match=rf"^to_{kind}: there is no folder '{tmp_path}/a/b'"):
        write(f"{tmp_path}/a/b/x.{kind}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(IsADirectoryError, match=f"^to_{kind}: expected a file's name, got ''"):
        write("")


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_an_export_that_fails_leaves_the_file_of_before(kind, tmp_path, monkeypatch):
    path, picture = tmp_path / f"a.{kind}", PICTURES["merge of 2"]()
    write = getattr(picture, f"to_{kind}")
    write(path)
    before = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match=f"^to_{kind}: cannot write '{path}': No space left"):
        write(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dpi", [0, -5, True, 1.5, float("nan"), "x", 10**6])
def test_a_resolution_that_is_none_is_refused(dpi):
    with pytest.raises((TypeError, ValueError), match="^dpi: expected "):
        PICTURES["merge of 2"]().to_png(dpi=dpi)


def test_notebooks_get_the_theme_that_was_asked_for():
    steps = merge(bumpy(3))
    for theme in ("light", "dark"):
        picture = show(steps, theme=theme)
        bundle = picture._repr_mimebundle_()
        assert bundle["image/svg+xml"] == picture._repr_svg_() == picture.to_svg(theme=theme)
        assert style.theme_of(theme).paper.lower() in bundle["image/svg+xml"]
        fit = "display: block; max-width: 100%; height: auto; "  # a narrow page shrinks it
        assert bundle["text/html"] == picture._repr_html_()
        assert bundle["text/html"].replace(fit, "") == bundle["image/svg+xml"]
        assert bundle["text/html"].index(fit) < bundle["text/html"].index(">")  # the root's, and no other's
    assert show(steps).theme == "light"


def test_pictures_neither_follow_nor_change_the_users_settings():
    picture, plain = PICTURES["rounded"](), svg_of("rounded")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "hatch.linewidth": 9, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        assert picture.to_svg() == plain
        assert dict(matplotlib.rcParams) == before


def test_threads_that_draw_in_two_themes_wait_for_each_other():
    before, papers = dict(matplotlib.rcParams), {}
    light_is_in, dark_is_in, light_is_out = Event(), Event(), Event()

    def light(theme):
        light_is_in.set()
        dark_is_in.wait(0.5)  # as long as it does, if the other does not wait outside
        return style.canvas(1.0)

    def dark(theme):
        dark_is_in.set()
        light_is_out.wait(0.5)
        return style.canvas(1.0)

    def draw_dark():
        light_is_in.wait()
        papers["dark"] = Picture(draw=dark, title="", alt="").figure("dark").get_facecolor()

    thread = Thread(target=draw_dark)
    thread.start()
    papers["light"] = Picture(draw=light, title="", alt="").figure("light").get_facecolor()
    light_is_out.set()
    thread.join()
    assert {name: to_hex(paper).upper() for name, paper in papers.items()} == {
        name: theme.paper for name, theme in style.THEMES.items()
    }
    assert dict(matplotlib.rcParams) == before


TRICKY = (
    "font-family: Foo",
    ' id="x" ',
    "font-family: Foo; y",
    "url(#a)",
    'a x="1.23456" d=',
    "<g id='hint:&'>",
    "a>b",
)


@pytest.mark.parametrize("words", TRICKY)
def test_words_that_look_like_attributes_stay(words):
    splits = HostSplits(policy=words, ranges=(((0, 5), (5, 9)),), nominal=(2,))
    root = ElementTree.fromstring(show(splits).to_svg())
    assert root[0].text == f"Under {words} the longest of 2 ranges holds 5 keys, 1.1× the average"
    assert words in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    hinted = Picture(draw=lambda theme: _hinted(words), title="", alt="").to_svg()
    hints = [title.text for title in ElementTree.fromstring(hinted).iter("{http://www.w3.org/2000/svg}title")]
    assert words in hints


def _hinted(words):
    figure = style.canvas(1.0)
    fill(style.inches(figure, 0, 0, 1, 1), style.boxes([0], [1], 0, 1), "red", hint=words)
    return figure


@pytest.mark.parametrize("theme", style.THEMES)
def test_what_cannot_be_printed_has_a_mark(theme):
    ugly, shown = "a\x1b\x00\ud800\ufffe\nb", "a����⏎b"
    labelled = replace(merge([0.0, 1.0]), about=ugly)
    pool = PageMap(
        pages=4, page_size=1, names=(ugly, "b"), numbers=(0, 1), lens=(1, 1), tables=((1,), (2,)), highlight=0
    )
    splits = HostSplits(policy=ugly, ranges=(((0, 5), (5, 9)),), nominal=(2,))
    for x in (labelled, pool, splits):
        picture = show(x, theme=theme)
        assert shown in "".join(ElementTree.fromstring(picture.to_svg()).itertext())
        assert picture.to_png()
    words = Picture(draw=lambda theme: style.canvas(1.0), title=ugly, alt=ugly)
    assert (words.title, words.alt) == (shown, shown)


def test_text_in_an_svg_is_text_in_fonts_that_others_have():
    svg = svg_of("odd name")
    assert "a $very$ odd_name &amp; &lt;long&gt;" in svg
    assert set(re.findall(r"font-family: ([^;]*);", svg)) == {
        "Arial, Helvetica, 'Liberation Sans', 'DejaVu Sans', sans-serif"
    }


def test_the_mouse_finds_the_ranges_of_a_request():
    svg = svg_of("one request")
    assert "<title>r0: 2,048 keys in 8 ranges: 0–255, 256–511, " in svg


# ---------------------------------------------------------------- legible text


def written(figure: Figure) -> list[Text]:
    """Return all text that is drawn."""
    texts = [*figure.texts]
    for ax in figure.axes:
        texts += ax.texts
        if ax.axison:
            texts += [ax.title, *(text for axis in shown(ax) for text in (axis.label, *axis.get_ticklabels()))]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def shown(ax: Axes) -> list[Axis]:
    return [axis for axis in (ax.xaxis, ax.yaxis) if axis.get_visible()]


def faults(figure: Figure) -> list[str]:
    """Return what leaves the canvas, and what collides."""
    figure.draw_without_rendering()
    found, width, height = [], figure.bbox.width, figure.bbox.height
    seen = [(text.get_text(), text.get_window_extent()) for text in written(figure)]
    for words, box in seen:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height:
            found.append(f"{words!r} leaves the canvas")
    for (words, a), (others, b) in combinations(seen, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > 1.5 and down > 2.5:
            found.append(f"{words!r} meets {others!r} ({across:.0f} x {down:.0f})")
    return found


@pytest.mark.parametrize(
    ("theme", "fonts"), [("light", style.FONTS), ("dark", style.FONTS[-1:])], ids=["light", "dark, widest font"]
)
@every_picture
def test_no_text_collides_or_leaves_the_canvas(name, theme, fonts, monkeypatch):
    monkeypatch.setattr(style, "FONTS", fonts)
    assert not faults(PICTURES[name]().figure(theme))


def test_the_lint_finds_what_is_wrong():
    with style.styled(style.LIGHT):
        figure = style.canvas(1.0)
        style.write(figure, 0.5, 0.5, "one")
        style.write(figure, 0.6, 0.5, "two")
        style.write(figure, 8.9, 0.8, "three")
        assert [fault.split(" (")[0] for fault in faults(figure)] == ["'three' leaves the canvas", "'one' meets 'two'"]


# ---------------------------------------------------------------- colours

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Ottosson (2020): linear RGB to OKLab.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]
both_themes = pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=lambda theme: theme.name)


def oklab(color: str, vision: str) -> np.ndarray:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ np.clip(np.array(VISION[vision]) @ linear, 0, 1))


@both_themes
@pytest.mark.parametrize("vision", VISION)
def test_requests_can_be_told_apart_with_any_colour_vision(theme, vision):
    labs = [oklab(color, vision) for color in theme.requests]
    assert len(labs) == 12
    assert min(np.linalg.norm(a - b) for a, b in combinations(labs, 2)) >= 0.08


@both_themes
def test_text_stands_out_from_the_paper_and_from_fills(theme):
    assert style.contrast(theme.ink, theme.paper) >= 12
    assert style.contrast(theme.soft, theme.paper) >= 4.5
    assert style.contrast(theme.accent, theme.paper) >= 4.5
    for color in theme.requests:
        assert style.contrast(style.text_on(color), color) >= 4.5
        for need in (3.0, 4.5):
            assert style.contrast(style.ink_of(color, theme, need), theme.paper) >= need


@both_themes
def test_marks_stand_out_from_the_paper(theme):
    """The light paper has four paler fills, which carry labels; neither their second shades nor lines are so pale."""
    pale = {3, 5, 7, 9} if theme is style.LIGHT else set()
    fills = {r: style.contrast(theme.request(r), theme.paper) for r in range(12)}
    assert min(contrast for r, contrast in fills.items() if r not in pale) >= 3
    assert min(fills.values()) >= 2
    assert min(style.contrast(theme.shade(r), theme.paper) for r in range(12)) >= 3
    assert style.contrast(theme.faint, theme.paper) >= 3


@both_themes
@pytest.mark.parametrize("vision", VISION)
def test_a_requests_two_shades_differ(theme, vision):
    pairs = [(oklab(theme.request(r), vision), oklab(theme.shade(r), vision)) for r in range(12)]
    assert min(np.linalg.norm(a - b) for a, b in pairs) >= 0.075


@both_themes
@pytest.mark.parametrize("name", ["compared", "ties", "merge of 12", "merge of 64"])
def test_whatever_carries_a_number_has_one_of_the_tested_colours(name, theme):
    mine = range(12)
    seen = {color.lower() for r in mine for color in (theme.request(r), theme.shade(r))}
    seen |= {theme.paper.lower(), style.ink_of(theme.request(0), theme).lower()}
    around = {theme.idle.lower(), theme.panel.lower()}  # the frame of the one, the dashed edge of the other are faint
    patches = [patch for ax in PICTURES[name]().figure(theme.name).axes for patch in ax.patches]
    assert {to_hex(patch.get_facecolor()) for patch in patches if patch.get_facecolor()[3]} <= seen | around
    lines = {to_hex(patch.get_edgecolor()) for patch in patches if patch.get_linewidth() and patch.get_edgecolor()[3]}
    assert lines <= seen | {theme.faint.lower()}


def test_a_thirteenth_request_differs_by_its_hatch():
    looks = {(style.LIGHT.request(r), style.LIGHT.hatch(r)) for r in range(48)}
    assert len(looks) == 48
    assert {style.LIGHT.hatch(r) for r in range(12)} == {""}


# ---------------------------------------------------------------- what is drawn


def test_programs_are_counted_as_launched():
    launched = lane(Static(), (257, 10))
    (view,) = schedule_views(launched)
    live = int((launched.schedule.segments[:, 2] < launched.schedule.segments[:, 3]).sum())
    assert (view.working, view.spare) == (live, launched.schedule.programs - live)
    assert f"= {live} programs with keys, {view.spare} launched empty" in show(launched).to_svg()
    assert (view.nominal, view.used) == ((8, 8), (5, 1))


@pytest.mark.parametrize("model", ["DeepSeek-V3", "falcon-180B", "a group of 20", "SmolLM2-135M"])
def test_programs_are_those_of_the_footprint_head_tiles_included(model):
    if model == "a group of 20":
        spec = AttentionSpec(heads=40, kv_heads=2, qk_dim=32, v_dim=32, scale=0.2)
        model = ModelSpec.uniform(spec, layers=1, context_len=512, page_size=1, kv_dtype=torch.float32)
    wb = workbench(model, lens=[300, 40], policy="static", engine="eager")
    layer = wb.layers[0]
    attention, lane = wb.model.layer(layer).attention, wb.plan().lane(layer)
    footprint = Footprint.of(lane, attention, multiprocessors=132)
    (view,) = schedule_views(wb)
    assert (view.working, view.working + view.spare) == (footprint.programs, footprint.launched)
    assert view.per_multiprocessor == footprint.per_multiprocessor
    assert view.even == pytest.approx(340 * footprint.programs / footprint.used / 132)
    tiles = -(-attention.group // 16)
    assert (f" × {tiles} head tiles = " in show(wb).to_svg()) == (tiles > 1)
    ctx = SplitContext(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        v_dim=attention.v_dim,
        mla=wb.model.mla,
        context_len=wb.model.context_len,
        multiprocessors=132,
    )
    assert cut_view("static", [300, 40], ctx).working == footprint.programs


def test_of_a_plan_programs_are_counted_per_tile_of_heads():
    wb = workbench("DeepSeek-V3", lens=[300], policy="static", engine="eager")
    svg = show(wb.plan()).to_svg()
    assert "5 programs with keys" in svg and "Programs: per tile of heads." in svg
    assert "multiprocessor" not in svg


def test_a_merge_has_the_colour_of_its_request():
    for theme in (style.LIGHT, style.DARK):
        for request in (0, 1, 5):
            figure = show(merge(bumpy(8), request=request)).figure(theme.name)
            bars = {to_hex(p.get_facecolor()).upper() for ax in figure.axes for p in ax.patches if p.get_gid()}
            assert bars == {style.ink_of(theme.request(request), theme).upper()}


def test_a_merge_says_whose_it_is():
    steps = replace(merge([1.0, 2.0], request=3), layer=18, head=4)
    assert steps.title == "layer 18, head 4, request 3"
    assert replace(steps, about="the whole text").title == "layer 18, head 4, the whole text"


def test_of_many_requests_the_longest_keep_a_row_in_batch_order():
    (view,) = schedule_views(lane(Seed(), MANY))
    panel = Panel.of(view)
    assert list(panel.rows) == sorted(panel.rows) and len(panel.rows) == 8
    assert min(MANY[r] for r in panel.rows) >= max(MANY[r] for r in panel.folded)
    assert sorted(panel.rows + panel.folded) == list(range(64))
    svg = show(view).to_svg()
    assert "56 others" in svg and "Grey: all other requests, up to the end of their longest." in svg


def test_a_longest_range_that_can_be_seen_is_preferred():
    view = view_of([[50, 9], *([20, 50, 40] for _ in range(9)), *([50] for _ in range(20)), *([60] for _ in range(8))])
    assert (view.longest, view.peaks) == (60, [(r, 0) for r in range(30, 38)])
    panel = Panel.of(view)
    assert set(panel.rows) < set(range(1, 10)) and panel.peak == (30, 0)
    assert "longest range: 60 keys, r30 among the others (tied by 7)" in show(view).to_svg()
    tied = Panel.of(replace(view, ranges=ranges_of([[60]] * 30 + [[30, 60]] * 8), nominal=(1,) * 38))
    assert tied.peak == (30, 1)
    assert "longest range: 60 keys, r30 (tied by 37)" in show(tied.view).to_svg()


def test_what_is_spare_is_counted_in_ranges():
    launched = lane(Static(), (257, 10))
    (view,) = schedule_views(launched)
    assert view.spare_ranges == launched.splits.capacity - sum(view.used) == view.spare // 8
    assert f"+ {view.spare_ranges} spare range" in show(launched).to_svg()
    assert replace(view, programs=view.programs + 1).spare_ranges is None


def test_all_margins_of_a_picture_have_one_form():
    few, many = lane(Static(splits=2), (900, 100)), lane(Static(splits=20), (900, 100))
    assert box_pitch([Panel.of(*schedule_views(few))])
    assert not box_pitch([Panel.of(*schedule_views(x)) for x in (few, many)])
    assert "outlined" not in show(few, many).to_svg()
    assert "(outlined: none)" in show(lane(Static(), (257, 10))).to_svg()


def test_marks_are_explained_where_they_occur():
    def caption(picture: Picture) -> str:
        return next(text.get_text() for text in picture.figure().texts if text.get_text().startswith("Each row"))

    assert caption(show(lane(Seed(), SKEWED[:4]))).count("\n") == 1
    assert caption(show(lane(Tile(), (1_000_000,)))).endswith("\nStriped: ranges too short to be drawn one by one.")
    assert "Hatched: from r12 on" in caption(show(lane(Seed(), MANY[:13])))
    assert "Hatched" not in caption(show(lane(Seed(), MANY[:12])))


def test_every_range_is_a_block_unless_it_is_too_fine_to_be_seen():
    def blocks(picture: Picture) -> int:
        patches = (patch for ax in picture.figure().axes for patch in ax.patches)
        paths = [patch.get_path() for patch in patches if str(patch.get_gid()).startswith("hint:")]
        return sum(int((path.codes == path.MOVETO).sum()) for path in paths)

    assert blocks(show(lane(Seed(), SKEWED))) == 20
    assert blocks(show(lane(Tile(), (1_000_000,)))) == 1  # 3,907 of them


@given(st.lists(st.integers(0, 2_000_000), max_size=8), st.integers(1, 2_000_000))
def test_the_key_axis_keeps_order_and_labels_what_it_shows(lens, most):
    steps = [(n, max(most, n // 50 + 1)) for n in lens]
    axis = KeyAxis.of(ranges_of([[min(step, n - at) for at in range(0, n, step)] for n, step in steps]))
    keys = np.unique([0, *lens, axis.top])
    at = axis.at(keys)
    assert at[0] == 0 and at[-1] == 1 and (np.diff(at) > 0).all()
    ticks = axis.ticks()
    assert ticks == sorted(set(ticks)) and 2 <= len(ticks) <= 12 and ticks[-1] <= axis.top
    assert (axis.knee is None and axis.squeeze == 1) or 3 < axis.squeeze < 25


def test_a_seam_has_whole_ranges_before_it_and_none_across():
    axis = KeyAxis.of(ranges_of([[32] * 100, [100] * 3]))
    assert (axis.knee, axis.cut) == (320, 0)
    assert KeyAxis.of(ranges_of([[320] * 10, [100] * 3])).knee is None
    both = [ranges_of([[32] * 100, [300]]), ranges_of([[200] * 16, [300]])]
    assert (KeyAxis.of(*both).knee, KeyAxis.of(*both).cut) == (800, 0)
    apart = [ranges_of([[31] * 100, [290]]), ranges_of([[290] * 10, [290]])]
    assert (KeyAxis.of(*apart).knee, KeyAxis.of(*apart).cut) == (290, 31)


@pytest.mark.parametrize("lens", [(640, 20), (640, 250), (640,), (640, 640)])
def test_a_seam_does_not_make_equal_ranges_look_unequal_for_nothing(lens):
    assert KeyAxis.of(lane(Static(splits=20), lens).splits.to_host().ranges).knee is None


def test_plans_with_several_lanes_name_their_layers():
    lanes = (lane(Seed(), (300, 20)), lane(Tile(), (300, 20)))
    lens = HostLens.of([300, 20], device=torch.device("cpu"))
    batch = DecodeBatch(rows=torch.tensor([0, 1]), seq=lens)
    plan = DecodePlan(
        batch=batch, lanes=lanes, lane_of_layer={i: i % 2 for i in range(12)}, epoch=0, multiprocessors=None
    )
    names = [view.name for view in schedule_views(plan)]
    assert names == ["seed, layers 0, 2, 4, 6, …", "tile, layers 1, 3, 5, 7, …"]
    assert len(show(plan).figure().axes) == 4


def test_a_workbench_can_be_looked_at():
    wb = workbench("SmolLM2-135M", lens=[96, 40], policy="static", engine="eager")
    assert (
        show(wb).title
        == "Under static 8 the longest of 5 ranges holds 32 keys, 10× an even share of 132 multiprocessors"
    )
    assert show(wb, wb.plan()).title.startswith("The longest range holds ")
    assert show(wb.plan()).title.startswith("Under static ")
    assert show(wb.plan().lane(0).splits).title == show(wb.plan().lane(0).splits.to_host()).title
    assert "layer 0, head 1, request 0" in show(wb.merge(0, request=0, head=1)).to_svg()


# ---------------------------------------------------------------- show


def test_show_says_what_it_can_show():
    for wrong in ((3,), (), (Seed(),)):
        with pytest.raises(TypeError, match="^show: expected one of .*, got ") as caught:
            show(*wrong)
        assert all(name in str(caught.value) for name in ("DecodePlan", "Workbench", "HostSplits", "MergeSteps"))
    with pytest.raises(TypeError, match="one kind, got Lane and MergeSteps"):
        show(lane(Seed(), (5,)), merge([0.0]))
    with pytest.raises(ValueError, match="theme: expected one of light, dark, got 'blue'"):
        show(merge([0.0]), theme="blue")
    with pytest.raises(ValueError, match="at most 2 merges, got 3"):
        lse_merge(*[merge([0.0])] * 3)


def test_options_go_to_the_kind_of_picture():
    wb = workbench("SmolLM2-135M", lens=[300], policy="static", engine="eager")
    view, stages = wb.scores(18, request=0), wb.stages(18, request=0, head=2)
    assert show(view, zoom=100, theme="dark").title == attention(view, zoom=100).title != show(view).title
    assert show(view, pool="split").to_svg() == attention(view, pool="split").to_svg() != show(view).to_svg()
    assert show(stages, zoom=100).to_svg() != show(stages).to_svg()
    with pytest.raises(TypeError, match="^show: a picture of Workbench has the options theme; got zoom, layer$"):
        show(wb, zoom=3, layer=18)
    with pytest.raises(TypeError, match="a picture of ScoreView has the options zoom, pool, theme; got request$"):
        show(view, request=0, zoom=100)


def test_the_help_of_show_lists_the_options_of_every_type():
    listed = re.findall(r"^- (.+): (.+)$", inspect.getdoc(Show) or "", re.MULTILINE)
    said = {kind: re.findall(r"`(\w+)`", words) for kinds, words in listed for kind in kinds.split(", ")}
    drawn = {name.rpartition(".")[2]: draw for name, draw in show._draws._items.items()}
    assert set(drawn) == set(show.types())
    for kind, draw in drawn.items():
        options = [name for name, x in inspect.signature(draw).parameters.items() if x.kind is x.KEYWORD_ONLY]
        assert said.get(kind, []) == options


def test_a_notebook_may_register_a_type_and_run_its_cell_again():
    for words in ("first", "second"):

        class Mine:
            pass

        @show.register(Mine)
        def mine(*xs: Mine, words: str = words) -> Picture:
            return Picture(draw=lambda theme: style.canvas(1.0), title=f"{words} {len(xs)}", alt="")

        assert show(Mine(), Mine()).title == f"{words} 2"
    assert "Mine" in show.types()


@pytest.mark.parametrize("name", ["compared", "merge of 8"])
def test_a_picture_is_redrawn_in_no_time(name, record_property):
    """CPU time, so that a busy machine does not matter; the bound is several times what it takes."""
    picture, start = PICTURES[name](), time.process_time()
    picture.to_png()
    seconds = time.process_time() - start
    record_property("redraw_seconds", round(seconds, 3))
    record_property("svg_bytes", len(svg_of(name).encode()))
    assert seconds < 3.0
