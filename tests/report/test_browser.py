"""Pages in a browser: every chart is drawn, nothing is fetched, and the page fits a phone."""

import json

import pytest

from hostdev.ext.report.command import make
from tests.report.runs import CONFIG, SUMMARY, write_files, write_run

SIZES = [(width, scheme) for width in (400, 1400) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run with everything, and a page of three runs of which two lack most."""
    folder = tmp_path_factory.mktemp("pages")
    full = write_run(folder / "a run with a rather long name", steps=2000)
    other = write_run(folder / "other", seed=1, summary=None, config={**CONFIG, "model": "dcn"})
    third = write_files(write_run(folder / "third", seed=2, summary={**SUMMARY, "auc": 0.8, "ranks": {}, "cache": {}}))
    made = {"one": [full], "three": [full, other, third]}
    for name, runs in made.items():
        (folder / f"{name}.html").write_text(make(runs), encoding="utf-8")
    return folder


def open_page(browser, path, width, scheme):
    browser.emulate(width, scheme)
    for log in ("browser", "performance"):
        browser.take_log(log)  # of the page before
    browser.open(path)
    browser.wait("return document.documentElement.hasAttribute('data-drawn')")


def requested(browser):
    messages = (json.loads(entry["message"])["message"] for entry in browser.take_log("performance"))
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize(("width", "scheme"), SIZES)
@pytest.mark.parametrize(("name", "charts"), [("one", 10), ("three", 13)])
def test_a_page(name, charts, width, scheme, browser, pages):
    open_page(browser, pages / f"{name}.html", width, scheme)
    assert browser.take_log("browser") == []
    urls = requested(browser)
    assert urls and [url for url in urls if not url.startswith(("file:", "data:"))] == []
    marks = """
        const count = (e) => e.querySelectorAll('svg .role-mark path').length;
        return [...document.querySelectorAll('.chart')].map(count)
    """
    drawn = browser.run(marks)
    assert len(drawn) == charts and min(drawn) > 0, drawn
    wide = """
        const isOutside = (e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, svg');
        const outside = [...document.querySelectorAll('body *')].filter(isOutside);
        return [document.documentElement.scrollWidth, outside.map((e) => e.outerHTML)]
    """
    page, outside = browser.run(wide)
    assert page <= width and outside == []
    sizes = browser.run("return [...document.querySelectorAll('.chart svg')].map((e) => e.clientWidth)")
    assert all(200 < size < width for size in sizes), sizes


def test_the_colours_follow_the_scheme_and_paper_is_white(browser, pages):
    open_page(browser, pages / "one.html", 1400, "dark")
    read = """
        const colour = (e, name) => getComputedStyle(e)[name];
        const label = document.querySelector('.chart svg .role-axis-label text');
        const line = document.querySelector('.chart svg .mark-line path');
        return [colour(document.body, 'backgroundColor'), colour(label, 'fill'), colour(line, 'stroke')]
    """
    dark = browser.run(read)
    browser.emulate(scheme="light")
    light = browser.run(read)
    assert all(a != b for a, b in zip(dark, light, strict=True))
    browser.emulate(scheme="dark", media="print")
    assert browser.run(read) == light and light[0] == "rgb(255, 255, 255)"


def test_charts_follow_the_width(browser, pages):
    open_page(browser, pages / "one.html", 1400, "light")
    browser.emulate(500)
    browser.wait("return [...document.querySelectorAll('.chart svg')].every((e) => e.getAttribute('width') < 500)")


def test_a_table_is_sorted(browser, pages):
    open_page(browser, pages / "three.html", 1400, "light")
    rows = "return [...document.querySelectorAll('#summary tbody tr')].map((e) => e.cells[0].textContent)"
    click = "document.querySelectorAll('#summary th button')[arguments[0]].click()"
    full, other, third = browser.run(rows)
    assert (other, third) == ("other", "third")
    orders = {
        0: [[full, other, third], [third, other, full]],
        2: [[third, full, other], [other, full, third]],  # AUC: 0.72, 0.71 of the last evaluation, 0.80
    }
    for column, wanted in orders.items():
        for order in wanted:
            browser.run(click, column)
            assert browser.run(rows) == order
    sort = "return [...document.querySelectorAll('#summary th')].map((e) => e.getAttribute('aria-sort'))"
    assert browser.run(sort)[2] == "ascending"
    for _ in range(2):  # the second run has no samples/s, and is last in either order
        browser.run(click, 4)
        assert browser.run(rows)[-1] == other


def test_a_chart_that_fails_says_so(browser, pages, tmp_path):
    text = (pages / "one.html").read_text().replace('"type":"area"', '"type":"nonsense"')
    (tmp_path / "bad.html").write_text(text)
    open_page(browser, tmp_path / "bad.html", 1400, "light")
    assert browser.take_log("browser") != []
    assert "This chart cannot be drawn" in browser.run("return document.body.textContent")
