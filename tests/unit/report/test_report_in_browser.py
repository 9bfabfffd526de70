"""A report's page in Chromium without a screen: no request leaves the machine, nothing fails, nothing is cut off."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from support.report_runs import RECORDED, made, several

from verl_precision.report.build import rebuild, write_report

pytestmark = pytest.mark.slow
WIDTHS = {"desktop": 1280, "phone": 390}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
EMPTY_TABLES = """() => [...document.querySelectorAll('table')].filter(
    table => [...table.querySelectorAll('tbody td')].every(cell => !cell.textContent.trim())
).map(table => table.textContent.trim().slice(0, 60))"""
MISSING_TARGETS = """() => [...document.querySelectorAll('a[href^="#"]')]
    .map(link => link.getAttribute('href').slice(1)).filter(id => !document.getElementById(id))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: `make test-all` as root installs it"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


def faults(browser: Browser, page: Path, width: str) -> tuple[list[str], Page]:
    """Return the faults of a page opened with all its details expanded, and the page."""
    view = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    found: list[str] = []
    view.on("console", lambda message: found.append(f"console: {message.text}") if message.type == "error" else None)
    view.on("pageerror", lambda error: found.append(f"page error: {error}"))
    view.on("requestfailed", lambda request: found.append(f"request failed: {request.url}"))
    own = ("file://", "data:")
    view.on("request", lambda sent: None if sent.url.startswith(own) else found.append(f"asks {sent.url}"))
    view.goto(page.as_uri(), wait_until="load")
    view.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    images = view.evaluate("() => [...document.images].map(image => [image.getAttribute('src'), image.naturalWidth])")
    found += [f"no image: {source}" for source, natural in images if not natural]
    found += [f"empty table: {text}" for text in view.evaluate(EMPTY_TABLES)]
    found += [f"no such place: #{target}" for target in view.evaluate(MISSING_TARGETS)]
    if (wide := view.evaluate("() => document.documentElement.scrollWidth")) > WIDTHS[width]:
        found.append(f"{wide} pixels wide")
    return found, view


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Return pages by name: a recorded report, and others of unusual runs."""
    root = tmp_path_factory.mktemp("pages")
    rebuild(max(RECORDED, key=lambda folder: len(list(folder.glob("runs/*")))), root / "recorded")
    write_report([made(root / "in/single")], root / "one run")
    short = made(root / "in/short", "fp32", 1, range(1, 3), **{"actor/entropy": None})
    write_report([*several(root / "in/four"), short], root / "unequal")
    long = "x" * 90  # a label, and a title, longer than a phone is wide
    write_report([(long, root / "in/single/metrics.jsonl")], root / "long", title=long)
    return {name: root / name / "index.html" for name in ("recorded", "one run", "unequal", "long")}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_a_fault(width, browser, pages):
    for name, page in pages.items():
        found, view = faults(browser, page, width)
        assert found == [], name
        assert len(view.evaluate("() => [...document.images].map(image => image.src)")) >= 3
        view.close()


def test_each_fault_is_detected(browser, pages, tmp_path):
    shutil.copytree(pages["one run"].parent, tmp_path, dirs_exist_ok=True)
    added = """<img src='figures/lost.svg'><script>missing()</script><script>console.error('x')</script>
        <script src='lost.js'></script><table><tbody><tr><td> </td></tr></tbody></table>
        <div style='width: 2000px'>x</div><img src='http://127.0.0.1:9/x.png'><a href='#nowhere'>x</a>"""
    (tmp_path / "index.html").write_text(pages["one run"].read_text().replace("</body>", f"{added}</body>"))
    found, _ = faults(browser, tmp_path / "index.html", "phone")
    kinds = "no image,page error,console: x,request failed,empty table,pixels wide,asks http,no such place"
    assert [kind for kind in kinds.split(",") if not any(kind in line for line in found)] == [], found
