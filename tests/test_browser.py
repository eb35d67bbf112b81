"""A real browser: JupyterLab runs a notebook with explorers, controls change picture and text, nothing leaves.

Skipped where Playwright or Chromium are missing, except under CI, where both must be there.
"""

import contextlib
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest
from PIL import Image

from attnlab import explore_splits
from attnlab.plots.style import THEMES

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET_BROWSER = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PATIENCE = 40_000
"""Milliseconds until a wait counts as failed; machines that run tests are busy."""
MARK = "ALL-CELLS-HAVE-RUN"

pytestmark = pytest.mark.slow


def missing() -> str | None:
    """Say what the machine lacks."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "needs Playwright: pip install playwright"
    return None if CHROMIUM else "needs Chromium: apt-get install chromium"


@dataclass(kw_only=True)
class Watched:
    """A page, and what it asked for and complained about."""

    page: Any
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, page: Any) -> "Watched":
        page.set_default_timeout(PATIENCE)
        watched = cls(page=page)
        page.on("request", lambda request: watched.urls.append(request.url))
        page.on("websocket", lambda socket: watched.urls.append(socket.url))
        page.on("pageerror", lambda error: watched.complaints.append(f"page error: {error}"))
        page.on("console", lambda m: watched.complaints.append(f"{m.text} {m.location}") if m.type == "error" else None)
        return watched

    def strangers(self) -> list[str]:
        """Return the addresses that are not on this machine."""
        parts = [(url, urlsplit(url)) for url in self.urls]
        return [
            url
            for url, at in parts
            if at.scheme not in ("data", "blob") and at.hostname not in ("127.0.0.1", "localhost")
        ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    lacking = missing()
    if lacking and os.environ.get("CI"):
        pytest.fail(lacking)
    if lacking:
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET_BROWSER)
        yield launched
        launched.close()


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running JupyterLab: where its notebooks and settings lie, and where it answers."""

    notebooks: Path
    settings: Path
    port: int
    token: str

    def url(self, path: str, query: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{path}?{query}token={self.token}"

    def wait_for_kernel(self, name: str) -> None:
        """Wait until a notebook's kernel is up and the page connected to it; the page calls it idle before that."""
        until = time.monotonic() + PATIENCE / 1000
        while time.monotonic() < until:
            with urllib.request.urlopen(self.url("api/sessions"), timeout=PATIENCE / 1000) as answer:
                kernels = [session["kernel"] for session in json.load(answer) if session["path"] == name]
            if any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in kernels):
                return
            time.sleep(0.1)
        pytest.fail(f"no kernel for {name}")

    def set(self, name: str, **values: object) -> None:
        """Change the user's settings of JupyterLab's application utilities."""
        self.settings.mkdir(parents=True, exist_ok=True)
        (self.settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start a server that knows nothing of the user's own set-up, and stop it."""
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Lab(
        notebooks=tmp_path_factory.mktemp("notebooks"),
        settings=home / "config/lab/user-settings/@jupyterlab/apputils-extension",
        port=port,
        token=secrets.token_hex(16),
    )
    made.set("notification", fetchNews="false", checkForUpdates=False)
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(_command(made), cwd=home, env=_environment(home), stdout=log, stderr=log)
    try:
        _wait_for(made, server, home / "server.log")
        yield made
    finally:
        server.terminate()  # it stops its kernels
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        server.kill()


def _command(lab: Lab) -> list[str]:
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={lab.port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={lab.token}", f"--ServerApp.root_dir={lab.notebooks}"),
        "--LabApp.extension_manager=readonly",
    ]


def _environment(home: Path) -> dict[str, str]:
    places = {
        "HOME": "",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "IPYTHONDIR": "ipython",
        "MPLCONFIGDIR": "matplotlib",
    }
    return {
        **os.environ,
        **{name: str(home / folder) for name, folder in places.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",  # the browser needs a core as well
    }


def _wait_for(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(lab.url("api/status"), timeout=2):
            return
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not come up:\n{log.read_text()[-2000:]}")


def write_notebook(path: Path, theme: str) -> None:
    cells = [
        "import attnlab",
        f'attnlab.explore_splits(policy="tile", tile=512, compare="seed", requests=8, theme="{theme}")',
        f'attnlab.explore_merge(theme="{theme}")',
        f'print("{MARK[:4]}" + "{MARK[4:]}")',  # so that the mark is in the output alone
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def run_all(watched: Watched, lab: Lab, name: str) -> None:
    """Open a notebook, run its cells, wait for the last one."""
    page = watched.page
    page.goto(lab.url(f"lab/tree/{name}", query="reset&"))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    lab.wait_for_kernel(name)
    page.locator('.lm-MenuBar-item:has-text("Run")').click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
    page.wait_for_selector(f'.jp-OutputArea-output:has-text("{MARK}")')


def move(page: Any, explorer: int, control: str, to: str) -> float:
    """Move a control; wait until words and picture of its explorer have changed, return the seconds.

    A slider takes a key. A list takes a choice: JupyterLab keeps the arrow keys of a closed list to itself.
    """
    words, picture = (page.locator(f".attnlab-{part}").nth(explorer) for part in ("words", "picture"))
    picture.locator("svg").wait_for()
    before = [words.inner_text(), picture.inner_html()]
    handle = page.locator(f".attnlab-{control} .noUi-handle")
    start = time.monotonic()
    if handle.count():
        handle.focus()
        page.keyboard.press(to)
    else:
        page.locator(f".attnlab-{control} select").select_option(label=to)
    page.wait_for_function(
        """([explorer, words, picture]) => {
            const now = part => document.querySelectorAll(`.attnlab-${part}`)[explorer];
            return now("words").innerText !== words && now("picture").innerHTML !== picture;
        }""",
        arg=[explorer, *before],
    )
    return time.monotonic() - start


MOVES = [
    (0, "parameter", "ArrowRight", "tile 1024 cuts"),
    (0, "compare", "static", "static 8 cuts"),
    (0, "policy", "seed", "seed 8 cuts"),
    (1, "head", "4", "head 4"),
    (1, "splits", "ArrowLeft", "in 4 splits"),
]
"""Explorer, control, key or choice, and what the words say then."""


@pytest.mark.parametrize("theme", THEMES)
def test_a_control_changes_picture_and_text(
    theme: str, lab: Lab, browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.set("themes", theme=f"JupyterLab {theme.title()}")
    write_notebook(lab.notebooks / f"{theme}.ipynb", theme)
    context = browser.new_context(viewport={"width": 1360, "height": 2100})
    watched = Watched.of(context.new_page())
    page = watched.page
    run_all(watched, lab, f"{theme}.ipynb")
    page.screenshot(path=tmp_path / f"{theme}_before.png")
    times = []
    for explorer, control, to, words in MOVES:
        times.append(move(page, explorer, control, to))
        assert words in page.locator(".attnlab-words").nth(explorer).inner_text()
    page.screenshot(path=tmp_path / f"{theme}_after.png")
    with capsys.disabled():
        print(
            f"\nfrom control to picture, {theme}: {', '.join(f'{1000 * t:.0f}' for t in times)} ms; {tmp_path}", end=""
        )
    tops = {round(page.locator(f".attnlab-{name}").bounding_box()["y"]) for name in ("policy", "parameter", "batch")}
    assert len(tops) == 1  # one row
    assert page.evaluate("document.body.dataset.jpThemeLight") == str(theme == "light").lower()
    assert corner(page.locator(".attnlab-picture svg").first.screenshot()) == THEMES[theme].paper.lower()
    assert watched.complaints == []
    assert watched.strangers() == []
    assert len(watched.urls) > 10  # the watcher has seen something
    context.close()


def corner(png: bytes) -> str:
    """Return the colour near a picture's upper left corner."""
    red, green, blue = Image.open(io.BytesIO(png)).convert("RGB").getpixel((4, 4))
    return f"#{red:02x}{green:02x}{blue:02x}"


@pytest.mark.parametrize("theme", THEMES)
def test_an_exported_page_needs_no_network(theme: str, browser: Any, tmp_path: Path) -> None:
    page_file = tmp_path / "splits.html"
    explore_splits(lens=[900, 4000, 17], compare="tile").picture.to_html(page_file)
    context = browser.new_context(color_scheme=theme, viewport={"width": 1000, "height": 700})
    context.set_offline(True)
    watched = Watched.of(context.new_page())
    watched.page.goto(page_file.as_uri())
    shown = watched.page.locator("svg:visible")
    assert shown.count() == 1
    assert shown.bounding_box()["width"] > 600
    assert corner(shown.screenshot(path=tmp_path / f"{theme}.png")) == THEMES[theme].paper.lower()
    assert watched.urls == [page_file.as_uri()]
    assert watched.complaints == []
    context.close()
