"""A report in a browser: nothing is asked of anybody, nothing fails, and all of it can be used by hand and by keyboard."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extent import EVERYTHING
from monitored_run import RANK, SPIKE, STEP, watched_run, write_monitored
from test_report import hostile, modules, runs  # noqa: F401 - fixtures

from bitwitness.report import build_report
from bitwitness.report.page import to_html

api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
BROWSER = os.environ.get("BITWITNESS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS), headless=True)
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(runs: Path, hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """Reports by name."""
    root = tmp_path_factory.mktemp("pages")
    asked = {name: [runs / name] for name in ("good", "transient", "persistent", "nan")} | {
        "pair": [runs / "a", runs / "b"],
        "monitored": [write_monitored(root / "run")],
        "hostile": [hostile],
        "several": [watched_run(root / "quiet"), watched_run(root / "broken", alerts=True)],
    }
    for name, named in asked.items():
        (root / f"{name}.html").write_text(to_html(build_report(named)))
    return {name: root / f"{name}.html" for name in asked}


class Opened:
    """A page that is open, and all that went wrong in it."""

    def __init__(self, browser: Any, file: Path, **settings: Any) -> None:
        self.page = browser.new_page(**settings)
        self.wrong: list[str] = []
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda asked: self._asked(asked.url, file))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=60_000)

    def _asked(self, url: str, file: Path) -> None:
        if url != file.as_uri() and not url.startswith(("data:", "blob:")):
            self.wrong.append(f"asked for {url}")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.page.close()
        assert not self.wrong


NAMES = ("good", "transient", "persistent", "nan", "pair", "monitored", "hostile", "several")
LOOKS = [{"viewport": DESKTOP}, {"viewport": PHONE, "color_scheme": "dark"}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("look", LOOKS, ids=["desktop", "phone, dark"])
def test_a_page_opens_whole_and_asks_nobody(name: str, look: dict, pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages[name], **look) as page:
        assert page.locator("h1").inner_text()
        assert "could not be drawn" not in page.locator("body").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (look.get("color_scheme") != "dark")


@pytest.mark.skipif(not EVERYTHING, reason="a minute of work: TEST_EVERYTHING=1, as make campaign sets it")
def test_a_large_run_opens_within_three_seconds(browser: Any, tmp_path: Path) -> None:
    run = write_monitored(tmp_path / "run", steps=1000, names=modules(500), ranks=8)
    page = tmp_path / "large.html"
    page.write_text(to_html(build_report([run])))
    assert page.stat().st_size < 15_000_000
    took = []
    for _ in range(3):
        started = time.perf_counter()
        with Opened(browser, page, viewport=DESKTOP):
            took.append(time.perf_counter() - started)
    assert min(took) < 3.0, took


def test_the_verdict_is_what_is_seen_first(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["persistent"], viewport=PHONE) as page:
        box = page.locator("h1").bounding_box()
        assert box["y"] + box["height"] < PHONE["height"] / 2
        assert page.locator("#todo").bounding_box()["y"] < PHONE["height"]


def test_the_timeline_zooms_by_buttons(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["monitored"], viewport=DESKTOP) as page:
        shown = (
            "(() => { const z = echarts.getInstanceByDom(document.getElementById('timeline')).getOption().dataZoom[0];"
        )
        shown += " return z.end - z.start; })()"
        assert page.evaluate(shown) == 100
        page.get_by_role("button", name="zoom in").click()
        page.get_by_role("button", name="later steps").click()
        assert page.evaluate(shown) == 50
        page.get_by_role("button", name="all steps").click()
        assert page.evaluate(shown) == 100
        page.get_by_role("checkbox", name="grad_norm").uncheck()
        page.get_by_role("checkbox", name="log").first.check()


def test_the_heat_map_goes_to_the_worst_and_by_keys(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["monitored"], viewport=DESKTOP) as page:
        said = page.locator("#heat-said")
        assert "head, step 197" in said.inner_text()
        page.get_by_role("combobox", name="rank").select_option(label=str(RANK))
        page.wait_for_selector(f"#heat canvas[aria-label*='rank {RANK}']")
        page.get_by_role("button", name="go to the worst place").click()
        assert said.inner_text().startswith(f"{SPIKE}, step {STEP}, rank {RANK}: ")
        page.locator("#heat canvas").first.focus()
        page.keyboard.press("ArrowLeft")
        assert f"step {STEP - 1}" in said.inner_text()
        page.get_by_role("combobox", name="as").select_option(label="L2 norm")
        api.expect(page.locator("#heat-said")).to_contain_text("about")


def test_the_tree_opens_by_keys(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["monitored"], viewport=DESKTOP) as page:
        page.locator("#tree [role=treeitem]").first.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tree-said").inner_text().startswith("layers: ")
        page.keyboard.press("Enter")
        assert page.locator("#tree [role=treeitem]").first.get_attribute("aria-label").startswith("layers: ")
        page.keyboard.press("Escape")
        assert page.locator("#tree [role=treeitem]").first.get_attribute("aria-label").startswith(".: ")


def test_of_several_runs_each_can_be_drawn(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["several"], viewport={"width": 1280, "height": 900}) as page:
        assert page.locator("section.run h2").first.inner_text().endswith("broken")
        worst = page.locator("#tree [role=treeitem]").first
        assert "worst inside: NaN or Inf" in worst.get_attribute("aria-label")
        for part in ("tree", "heat"):
            page.locator(f"#{part}-controls").get_by_role("combobox", name="run").select_option(label="quiet")
        assert "worst inside: no alert" in worst.get_attribute("aria-label")
        page.wait_for_selector("#heat canvas")
        assert page.locator("#heat canvas").count() == 1
        scroll, seen = page.evaluate(
            "[document.querySelector('#table').scrollWidth, document.querySelector('#table').clientWidth]"
        )
        assert scroll <= seen  # the message is not cut
        assert page.locator("#table td.message").first.bounding_box()["width"] >= 250


def test_on_a_phone_rows_have_names_and_events_their_message(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["several"], viewport=PHONE, color_scheme="dark") as page:
        names = page.locator("#heat .labels span")
        assert names.count() > 5
        assert names.first.is_visible()
        box = page.locator("#table td.message").first.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"]
        assert "activation of head" in page.locator("#table td.message").first.inner_text()


def test_the_chosen_cell_is_framed_as_no_cell_is(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["monitored"], viewport=DESKTOP) as page:
        look = "(name) => getComputedStyle(document.querySelector('#heat .cursor'))[name]"
        assert page.evaluate(look, "borderTopColor") == "rgb(0, 0, 0)"
        assert page.evaluate(look, "outlineColor") == "rgb(255, 255, 255)"
        assert page.locator("#heat .labels .chosen").inner_text() == "head"


def test_the_graph_and_the_table_of_a_pair(pages: dict[str, Path], browser: Any) -> None:
    with Opened(browser, pages["pair"], viewport=DESKTOP) as page:
        first = page.locator("#graph .node.first")
        assert first.count() == 1
        assert "the first that is wrong" in first.text_content()
        first.focus()
        assert "the first that is wrong" in page.locator("#graph-said").inner_text()
        rows = page.locator("#table tbody tr")
        before = rows.count()
        page.get_by_role("searchbox").fill("tanh differs")
        assert 0 < rows.count() < before
        assert all("tanh" in row.lower() for row in rows.all_inner_texts())
        page.get_by_role("button", name="sort by change").click()
        changes = [float(row.split("\t")[4]) for row in rows.all_inner_texts()]
        assert changes == sorted(changes)


def test_it_can_be_printed(pages: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    with Opened(browser, pages["monitored"], viewport=DESKTOP, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".controls").first.is_visible()
        assert page.pdf(path=tmp_path / "it.pdf")[:4] == b"%PDF"
