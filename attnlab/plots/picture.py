"""A picture: a way of drawing that can be asked for a figure, an SVG, a PNG or a web page, in either theme."""

from __future__ import annotations

import hashlib
import io
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, overload

from matplotlib.figure import Figure

from attnlab.checks import positive, require
from attnlab.files import place, write_whole
from attnlab.plots.style import THEMES, Theme, styled, theme_of
from attnlab.plots.words import marked

PNG_DPI, MOST_DPI = 156, 1200
PORTABLE = "Arial, Helvetica, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""The fonts that an SVG asks for: the reader's machine need not have those of the machine that drew it."""
HINT = "hint:"
"""A matplotlib artist whose gid begins so shows the rest of it where the mouse rests on it (SVG, HTML)."""

# Without these matplotlib writes an RDF block with the date and addresses of its own.
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_QUICK = {"compress_level": 3}  # a tenth of the time saved, for 3% more bytes

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{title}</title>
<style>
body {{ margin: 0; background: {light_paper} }}
svg {{ display: block; max-width: 100%; height: auto; margin: 0 auto }}
.dark {{ display: none }}
@media screen and (prefers-color-scheme: dark) {{
  body {{ background: {dark_paper} }}
  .light {{ display: none }}
  .dark {{ display: block }}
}}
</style>
</head>
<body>
<div class="light">
{light}</div>
<div class="dark">
{dark}</div>
</body>
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What `show` returns. Notebooks display it, in `theme` unless a method is asked for another.

    `draw` makes the figure in a theme; `title` is the sentence above the picture, `alt` says what is to be seen for
    those who cannot see it.
    """

    draw: Callable[[Theme], Figure]
    title: str
    alt: str
    theme: str = "light"

    def __post_init__(self) -> None:
        for name in ("title", "alt"):
            object.__setattr__(self, name, marked(getattr(self, name)))

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def figure(self, theme: str | None = None) -> Figure:
        """Return a new matplotlib figure, free of pyplot."""
        chosen = theme_of(theme or self.theme)
        with styled(chosen):
            return self.draw(chosen)

    @overload
    def to_svg(self, path: None = None, *, theme: str | None = None) -> str: ...
    @overload
    def to_svg(self, path: str | pathlib.Path, *, theme: str | None = None) -> pathlib.Path: ...
    def to_svg(self, path: str | pathlib.Path | None = None, *, theme: str | None = None) -> str | pathlib.Path:
        """Return the picture as SVG; where a path is given, write it there and return the path.

        The text depends on the data alone. It names nothing outside of itself, and its ids differ from those of
        any other picture, so that it may stand beside others in one page.
        """
        path = _target(path, "svg")
        svg = _clean(self._saved(theme, "svg", metadata=_NO_METADATA).decode(), self.title, self.alt)
        return svg if path is None else _written(path, "svg", svg.encode())

    @overload
    def to_png(self, path: None = None, *, theme: str | None = None, dpi: int = PNG_DPI) -> bytes: ...
    @overload
    def to_png(self, path: str | pathlib.Path, *, theme: str | None = None, dpi: int = PNG_DPI) -> pathlib.Path: ...
    def to_png(
        self, path: str | pathlib.Path | None = None, *, theme: str | None = None, dpi: int = PNG_DPI
    ) -> bytes | pathlib.Path:
        """Return the picture as PNG; where a path is given, write it there and return the path."""
        path = _target(path, "png")
        require(positive("dpi", dpi) <= MOST_DPI, f"dpi: expected at most {MOST_DPI:,} pixels an inch, got {dpi:,}")
        about = {"Title": self.title, "Software": None}
        png = self._saved(theme, "png", dpi=dpi, metadata=about, pil_kwargs=_QUICK)
        return png if path is None else _written(path, "png", png)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | pathlib.Path) -> pathlib.Path: ...
    def to_html(self, path: str | pathlib.Path | None = None) -> str | pathlib.Path:
        """Return one page with the picture in both themes; where a path is given, write it there and return the path.

        The page shows the one that the reader's system prefers, and the light one on paper.
        """
        path = _target(path, "html")
        svgs = {name: self.to_svg(theme=name) for name in THEMES}
        papers = {f"{name}_paper": theme.paper for name, theme in THEMES.items()}
        html = _PAGE.format(title=escape(self.title), **svgs, **papers)
        return html if path is None else _written(path, "html", html.encode())

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return _fitted(self.to_svg())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # As HTML the picture gets as narrow as its cell; JupyterLab gives an SVG its full width, and cuts it.
        svg = self.to_svg()
        return {"text/html": _fitted(svg), "image/svg+xml": svg, "text/plain": repr(self)}

    def _saved(self, theme: str | None, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        figure = self.figure(theme)
        with styled(theme_of(theme or self.theme)):  # hatches and the kind of text are settled while saving
            figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def _target(path: str | pathlib.Path | None, kind: str) -> pathlib.Path | None:
    """Return the path to write to, if any; raise where its name says another format, or no file can lie there."""
    if path is None:
        return None
    place(path, name=f"to_{kind}")
    target = pathlib.Path(path)
    suffixes = ("", ".html", ".htm") if kind == "html" else ("", f".{kind}")
    require(
        target.suffix.lower() in suffixes,
        f"to_{kind}: writes {kind.upper()}, but {target.name!r} ends in {target.suffix!r}; name it *.{kind}",
    )
    return target


def _written(target: pathlib.Path, kind: str, content: bytes) -> pathlib.Path:
    write_whole(target, content, name=f"to_{kind}")
    return target


def _fitted(svg: str) -> str:
    """Return an SVG of `_clean`'s that shrinks with the page it is put into."""
    return svg.replace(' style="', ' style="display: block; max-width: 100%; height: auto; ', 1)


def _clean(svg: str, title: str, alt: str) -> str:
    """Return matplotlib's SVG as a good guest in someone else's page: described, with nothing that reaches outside."""
    svg = svg[svg.index("<svg") :]
    # Matplotlib styles "*", which would reach every element of the page that the picture is put into.
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = _with_attributes(svg, _plain)
    svg = _own_ids(re.sub(rf'<g id="{HINT}([^"]*)">', r"<g><title>\1</title>", svg))
    look = f"font-family: {PORTABLE}; stroke-linejoin: round; stroke-linecap: butt"
    root = f' role="img" aria-label="{escape(f"{title}. {alt}")}" style="{look}">'
    head, body = svg.split(">", 1)
    return f"{head}{root}\n <title>{escape(title)}</title>\n <desc>{escape(alt)}</desc>{body}"


def _with_attributes(svg: str, change: Callable[[str, str], str | None]) -> str:
    """Return an SVG whose tags have other attributes: `change` takes a name and a value, and drops one by None.

    Texts stay as they are, whatever they look like: in them, as in values, < and > are escaped.
    """

    def attribute(found: re.Match[str]) -> str:
        value = change(found[1], found[2][1:-1].replace('"', "&quot;"))
        return "" if value is None else f' {found[1]}="{value}"'

    return _TAG.sub(lambda tag: _ATTRIBUTE.sub(attribute, tag[0]), svg)


_TAG = re.compile(r"<[^>]*>")
_ATTRIBUTE = re.compile(r""" ([\w:-]+)=("[^"]*"|'[^']*')""")


def _plain(name: str, value: str) -> str | None:
    """Leave out fonts that a machine may lack, and turns by nothing; of coordinates keep two decimals, which do."""
    if name == "style":
        return re.sub(r"font-family: [^;]*;? ?", "", value)
    if name in ("d", "x", "y"):
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", value)
    return None if name == "transform" and value.startswith("rotate(-0 ") else value


def _own_ids(svg: str) -> str:
    """Keep the ids that are referred to, and name them after the content; matplotlib calls every figure "figure_1"."""
    digest, names = hashlib.sha256(svg.encode()).hexdigest()[:8], dict[str, str]()

    def refer(name: str, value: str) -> str:
        # A reference is url(#id) inside a value, or all of a link.
        pattern = r"^(#)(.+)$" if name.endswith("href") else r"(url\(#)([^)]+)"
        return re.sub(pattern, lambda m: m[1] + names.setdefault(m[2], f"a{digest}-{len(names)}"), value)

    svg = _with_attributes(svg, refer)
    return _with_attributes(svg, lambda name, value: names.get(value) if name == "id" else value)
