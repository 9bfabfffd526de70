"""A report's page in a real browser, Chromium without a screen: it asks for nothing, nothing fails, nothing is cut.

The browser is Debian's package, which ``make test`` installs where it is missing.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from test_report import RECORDED, made, several

from lib.report import build as report

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
EMPTY_TABLES = """() => [...document.querySelectorAll('table')].filter(
    table => !table.tBodies[0] || !table.tBodies[0].rows.length
        || ![...table.tBodies[0].querySelectorAll('td')].some(cell => cell.textContent.trim())
).map(table => table.textContent.trim().slice(0, 60))"""
MISSING_TARGETS = """() => [...document.querySelectorAll('a[href^="#"]')]
    .map(link => link.getAttribute('href').slice(1)).filter(id => !document.getElementById(id))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: make browser"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


def faults(browser: Browser, page: Path, width: str) -> tuple[list[str], Page]:
    """What goes wrong when a page is opened and all of it is looked at."""
    across, down = WIDTHS[width]
    view = browser.new_page(viewport={"width": across, "height": down})
    found: list[str] = []
    view.on("console", lambda told: found.append(f"console: {told.text}") if told.type == "error" else None)
    view.on("pageerror", lambda error: found.append(f"page error: {error}"))
    view.on("requestfailed", lambda request: found.append(f"request failed: {request.url}"))
    view.on("request", lambda asked: found.append(f"asks {asked.url}") if not local(asked.url) else None)
    view.goto(page.as_uri(), wait_until="load")
    view.evaluate("() => document.querySelectorAll('details').forEach(each => each.open = true)")
    images = view.evaluate("() => [...document.images].map(image => [image.getAttribute('src'), image.naturalWidth])")
    found += [f"no image: {source}" for source, natural in images if not natural]
    found += [f"empty table: {text}" for text in view.evaluate(EMPTY_TABLES)]
    found += [f"no such place: #{target}" for target in view.evaluate(MISSING_TARGETS)]
    if (wide := view.evaluate("() => document.documentElement.scrollWidth")) > across:
        found.append(f"{wide} pixels wide on a screen of {across}")
    return found, view


def local(url: str) -> bool:
    return url.startswith(("file://", "data:"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """By what they are of the reports to look at."""
    root = tmp_path_factory.mktemp("pages")
    recorded = {str(folder): folder for folder in RECORDED if (folder / "figures").exists()}  # as it is committed
    if not recorded:
        report.again(RECORDED[0], root / "recorded")
        recorded = {"recorded": root / "recorded"}
    report.write([made(root / "in" / "alone")], root / "one run")
    short = [made(root / "in" / "short", "fp32", 1, range(1, 3), **{"actor/entropy": None})]
    report.write([*several(root / "in" / "four"), *short], root / "unequal", expected=["bf16_train_fp16_infer"])
    long = "x" * 90  # a label, and a title, longer than a phone is wide
    file = root / "in" / "foreign.jsonl"
    shutil.copy(root / "in" / "alone" / "metrics.jsonl", file)
    report.write([(long, file)], root / "long", title=long)
    folders = recorded | {name: root / name for name in ("one run", "unequal", "long")}
    return {name: folder / "index.html" for name, folder in folders.items()}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_a_fault(width, browser, pages):
    for name, page in pages.items():
        found, view = faults(browser, page, width)
        assert found == [], name
        assert len(view.evaluate("() => [...document.images].map(image => image.src)")) >= 3
        view.close()


def test_what_is_broken_is_seen(browser, pages, tmp_path):
    """Each fault that is looked for, put into a page."""
    text = pages["one run"].read_text()
    body = "</body>"
    for broken, said in (
        (text.replace("figures/reward.svg", "figures/lost.svg"), "no image"),
        (text.replace(body, "<script>missing()</script>" + body), "page error"),
        (text.replace(body, "<script>console.error('x')</script>" + body), "console"),
        (text.replace(body, "<script src='lost.js'></script>" + body), "request failed"),
        (text.replace(body, "<table><tbody><tr><td> </td></tr></tbody></table>" + body), "empty table"),
        (text.replace(body, "<div style='width: 2000px'>x</div>" + body), "pixels wide"),
        (text.replace(body, "<img src='http://127.0.0.1:9/x.png'>" + body), "asks http"),
        (text.replace(body, "<a href='#nowhere'>x</a>" + body), "no such place"),
    ):
        assert broken != text
        shutil.copytree(pages["one run"].parent, tmp_path / "page", dirs_exist_ok=True)
        (tmp_path / "page" / "index.html").write_text(broken)
        found, view = faults(browser, tmp_path / "page" / "index.html", "phone")
        view.close()
        assert any(fault.startswith(said) or said in fault for fault in found), (said, found)
