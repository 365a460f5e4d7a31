"""The report in a real browser: drawn, alive, silent on the network, and readable on a phone."""

import json
import shutil

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.cli.main import main
from ownerwise.report import write_report
from ownerwise.wording import up
from tools.report_tools import made_run, small_plan

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver, none was found"
)

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
GROUPS = 14
EVALUATIONS = 21
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A report of two methods, two seeds each, and 14 groups, one of them with a hostile name."""
    names = [HOSTILE, *(f"ward {i}" for i in range(1, GROUPS))]
    budgets = {name: 0.5 * 1.25**i for i, name in enumerate(names)}
    runs = [
        made_run(label, seed=seed, lift=lift, budgets=budgets, evaluations=EVALUATIONS)
        for label, lift in (("IDP-SGD", 0.0), ("INO-SGD", 0.6))
        for seed in range(2)
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(runs, path, title=HOSTILE)
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The report, freshly opened on a wide and light screen."""
    emulate(browser, "light")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened(browser, address)
    return browser


def opened(browser, address):
    browser.get(address)
    wait_for(browser, "document.documentElement.dataset.ready === 'yes'")


def emulate(browser, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def ask(page, expression, *arguments):
    return page.execute_script(f"return {expression}", *arguments)


def wait_for(page, expression):
    """Wait for what the browser does in its own time."""
    WebDriverWait(page, 20).until(lambda page: ask(page, expression))


def traces(page, plot):
    """What plotly holds: (series, mode, number of points, visible) of every trace."""
    script = (
        "document.getElementById(arguments[0]).data.map(t => [t.legendgroup, t.mode, t.x.length, "
        "t.visible])"
    )
    return [tuple(found) for found in ask(page, script, plot)]


def lines_drawn(page, plot):
    return ask(page, "document.querySelectorAll('#' + arguments[0] + ' .lines path').length", plot)


def point(page, element, x, y):
    """Move the mouse to a position within an element, given as shares of its size."""
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    size = element.size
    across, down = int((x - 0.5) * size["width"]), int((y - 0.5) * size["height"])
    ActionChains(page).move_to_element_with_offset(element, across, down).perform()


def luminance(colour):
    """Return how bright "rgb(...)" is, from 0 to 255."""
    return sum(float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]) / 3


def test_every_figure_has_its_data(page):
    line_and_band = [
        (number, mode, points, True)
        for number in "01"
        for mode, points in (("none", 2 * EVALUATIONS), ("lines+markers", EVALUATIONS))
    ]
    shown = ask(page, "[...document.querySelectorAll('.panel:not([hidden]) .plot')].map(p => p.id)")
    learning = [name for name in shown if name.startswith("learning")]
    assert len(learning) == 12
    for name in (*learning, "worst-0", "worst-1"):
        assert traces(page, name) == line_and_band
    assert traces(page, "gain-0") == [("1", "markers", GROUPS, True), ("1", "lines", 2, True)]
    assert [(t[0], t[2]) for t in traces(page, "trade-off-0")] == [
        ("0", 2),
        ("1", 2),
        ("0", 1),
        ("1", 1),
    ]
    assert len(traces(page, "spending-0")) == 6
    assert [len(traces(page, f"importance-{i}")) for i in (0, 1)] == [1, 1]
    drawn = ask(page, "[...document.querySelectorAll('.plot')].filter(p => p.data).length")
    assert drawn == len(shown) == 12 + 1 + 2 + 1 + 1 + 2
    for name in shown:
        painted = "document.querySelectorAll('#' + arguments[0] + ' .trace path').length"
        assert ask(page, painted, name) > 0


def test_hovering_shows_the_values(page):
    plot = page.find_element("css selector", "#learning-0 .nsewdrag")
    point(page, plot, 0.5, 0.5)
    words = ask(page, "document.querySelector('#learning-0 .hoverlayer').textContent")
    assert "IDP-SGD" in words
    assert "INO-SGD" in words
    assert "%" in words
    assert "±" in words


def test_the_legend_hides_a_curve_in_every_panel(page):
    key = page.find_element("css selector", "[data-figure=learning] .key[data-series='0']")
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    for name in ("learning-0", "learning-5"):
        visible = {(series, shown) for series, _, _, shown in traces(page, name)}
        assert visible == {("0", False), ("1", True)}
        assert lines_drawn(page, name) == 1
    assert all(shown for *_, shown in traces(page, "worst-0"))
    key.send_keys(Keys.ENTER)
    assert all(shown for *_, shown in traces(page, "learning-0"))
    assert lines_drawn(page, "learning-0") == 2


def test_recall_and_loss_can_be_switched(page):
    values = "document.getElementById('learning-0').data[1].y[0]"
    assert ask(page, values) == pytest.approx(0.1)
    page.find_element("css selector", "[data-view=Loss]").click()
    assert ask(page, values) == pytest.approx(2.3)


def test_further_groups_can_be_chosen(page):
    hidden = page.find_element("css selector", "[data-shows]:not(:checked)")
    page.find_element("css selector", ".chooser summary").click()
    name = hidden.get_attribute("data-shows")
    assert ask(page, "document.getElementById(arguments[0]).data", name) is None
    hidden.click()
    assert len(traces(page, name)) == 4
    assert page.find_element("css selector", ".chooser .count").text == "13"


def test_the_theme_follows_the_system_and_the_toggle(page):
    background = "getComputedStyle(document.body).backgroundColor"
    axis = "getComputedStyle(document.querySelector('#worst-0 .xtick text')).fill"
    line = "document.querySelector('#worst-0 .lines path').style.stroke"
    key = "document.querySelector('.key line').getAttribute('stroke')"
    light = [ask(page, script) for script in (background, axis, line, key)]
    assert luminance(light[0]) > 200 > luminance(light[1])
    toggle = page.find_element("id", "theme")
    page.execute_script("arguments[0].focus()", toggle)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    dark = [ask(page, script) for script in (background, axis, line, key)]
    assert luminance(dark[0]) < 50 < luminance(dark[1])
    assert all(before != after for before, after in zip(light, dark, strict=True))
    assert toggle.get_attribute("aria-pressed") == "true"
    toggle.click()
    assert [ask(page, script) for script in (background, axis, line, key)] == light
    page.refresh()
    wait_for(page, "document.documentElement.dataset.ready === 'yes'")
    emulate(page, "dark")
    wait_for(page, "document.documentElement.dataset.theme === 'dark'")
    assert [ask(page, script) for script in (background, axis, line, key)] == dark


def contrast(first, second):
    """Return the contrast ratio of two colours "rgb(...)", as WCAG defines it."""

    def relative(colour):
        parts = [float(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((relative(first), relative(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def plan_of(records_each, **options):
    owners = ow.Owners(
        np.repeat(["ann", "ben", "eve"], records_each), {"ann": 1, "ben": 2, "eve": 4}, delta=1e-3
    )
    total = 3 if options.get("unit") == "owner" else 3 * records_each
    return ow.plan(owners, steps=20, batch_size=0.1 * total, **options)


PER_RECORD = "Private per RECORD, not per person: up to {} records each"
UNPROTECTED = (
    "UNPROTECTED: 61 owners, whose records are used for validation or testing only. They are not "
    "in the plan, and no epsilon holds for them."
)
OUTSIDE = {"unprotected": 61, "in_plan": 0}
NOBODY = {"held_out_owners": {"unprotected": 0, "in_plan": 0}}


@pytest.mark.parametrize(
    ("records", "options", "config", "kind", "title", "says"),
    [
        (1, {}, {}, "good", "Private", "Each training record is protected"),
        (4, {}, {}, "caution", PER_RECORD.format(4), "all records of one owner together, ε is up"),
        (168, {}, {}, "caution", PER_RECORD.format(168), "one owner together, ε reaches more than"),
        (4, {"unit": "owner"}, NOBODY, "good", "Private", "Each owner in the plan is protected"),
        (
            4,
            {"unit": "owner"},
            {},
            "caution",
            "Private, if no held-out owner is in the plan",
            "UNCHECKED: the owners of the validation and test records were not given",
        ),
        (4, {}, {"seed": 0}, "bad", "NOT PRIVATE", "from a fixed seed (0)"),
        (4, {"unit": "owner"}, {"seed": 0}, "bad", "NOT PRIVATE", "from a fixed seed (0)"),
        (
            1,
            {},
            {"held_out_owners": OUTSIDE},
            "caution",
            "Private, except for held-out owners",
            UNPROTECTED,
        ),
        (
            4,
            {"unit": "owner"},
            {"held_out_owners": OUTSIDE},
            "caution",
            "Private, except for held-out owners",
            UNPROTECTED,
        ),
        (4, {}, {"held_out_owners": OUTSIDE}, "caution", PER_RECORD.format(4), UNPROTECTED),
        (4, {}, {"held_out_owners": OUTSIDE, "seed": 0}, "bad", "NOT PRIVATE", UNPROTECTED),
    ],
    ids=[
        "people",
        "records",
        "many-records",
        "owners",
        "owners-unchecked",
        "seed",
        "owners-seed",
        "people-held-out",
        "owners-held-out",
        "records-held-out",
        "seed-held-out",
    ],
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_banner_tells_people_from_records(
    browser, tmp_path, records, options, config, kind, title, says, scheme
):
    """Pitfall 46: green only if what is protected is a person, and all people are protected."""
    run = made_run(plan=plan_of(records, **options), **{"seed": None, **config}, steps=20)
    path = tmp_path / "report.html"
    write_report([run], path)
    emulate(browser, scheme)
    opened(browser, path.as_uri())
    (banner,) = browser.find_elements("css selector", ".banner[role=note]")
    assert banner.get_attribute("class") == f"banner {kind}"
    heading = banner.find_element("tag name", "strong")
    assert heading.text == title
    colours = [heading.value_of_css_property("color"), banner.value_of_css_property("color")]
    card = banner.value_of_css_property("background-color")
    red, green, blue = (float(x) for x in card.split("(")[1].rstrip(")").split(",")[:3])
    assert {"good": green > red, "caution": red >= green > blue, "bad": red > green}[kind]
    assert min(contrast(colour, card) for colour in colours) >= 4.5
    assert says in banner.text
    largest = float(run.owner_epsilon().max())
    words = f"ε is up to {up(largest, 4)}." if np.isfinite(largest) else "ε reaches more than 100."
    assert (words in banner.text) == (title.startswith("Private per RECORD"))
    assert ("with their own budget: ε 1 to 4 per owner" in banner.text) == (
        kind != "bad" and "unit" in options
    )
    top = banner.location["y"] + banner.size["height"]
    assert top < 900, "the banner is seen without scrolling"
    emulate(browser, "light")


def test_the_report_uses_no_network_and_has_no_errors(page):
    point(page, page.find_element("css selector", "#gain-0 .nsewdrag"), 0.5, 0.5)
    assert ask(page, "performance.getEntriesByType('resource').length") == 0
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages
             if m["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert asked
    assert not {url.split(":")[0] for url in asked} & {"http", "https", "ws", "wss", "ftp"}
    assert page.get_log("browser") == []
    buttons = "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
    assert not [title for title in ask(page, buttons) if "hare" in title or "loud" in title]


def test_names_stay_text(page):
    assert ask(page, "window.broken") is None
    assert page.find_element("css selector", "h1").text == HOSTILE
    assert ask(page, "document.querySelectorAll('script').length") == 3
    assert ask(page, "document.querySelectorAll('main img').length") == 0


def test_a_phone_scrolls_tables_but_not_the_page(page, address):
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(page, address)
    assert ask(page, "innerWidth") == 390
    assert ask(page, "document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('svg.main-svg')].filter(s => s.clientWidth > 390).length"
    assert ask(page, wide) == 0
    assert "ε spent per record" in page.find_element("css selector", ".tiles").text
    column = page.find_element("css selector", "#budgets thead th:nth-child(2)")
    assert column.text == "ε spent per record"
    assert column.rect["x"] + column.rect["width"] <= 390
    page.execute_script("document.querySelector('.scroll').scrollLeft = 50")
    assert ask(page, "document.querySelector('.scroll').scrollLeft") == 50


def test_charts_follow_the_width_of_the_window_and_of_paper(page):
    fits = (
        "[...document.querySelectorAll('.panel:not([hidden]) .plot')].every(p => "
        "p.clientWidth === p.querySelector('.main-svg').clientWidth)"
    )
    assert ask(page, fits)
    page.set_window_size(800, 900)
    wait_for(page, f"innerWidth < 900 && {fits}")
    page.set_window_size(1200, 900)
    emulate(page, "dark")
    wait_for(page, f"document.documentElement.dataset.theme === 'dark' && {fits}")
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert ask(page, "document.querySelector('main').clientWidth") == 700
    assert ask(page, "document.documentElement.dataset.theme") == "light"
    assert ask(page, fits)
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert ask(page, "document.documentElement.dataset.theme") == "dark"
    assert ask(page, fits)


def test_no_column_of_a_table_is_cut_off_on_paper(browser, tmp_path):
    """Paper cannot be scrolled: a table with the spending under eight plans is made smaller."""
    plans = [small_plan(steps=3 + number) for number in range(8)]
    runs = [made_run(f"a method with plan {at}", plan=plan) for at, plan in enumerate(plans)]
    write_report(runs, tmp_path / "plans.html")
    opened(browser, (tmp_path / "plans.html").as_uri())
    cut = "[...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth)"
    ended = "[...document.querySelectorAll('.scroll > *')].every(t => t.style.zoom === '')"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert ask(browser, f"{cut}.length") == 0
    assert not ask(browser, ended)
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert ask(browser, ended)


def test_the_policy_stops_every_connection_and_foreign_script(page):
    script = """
        const done = arguments[arguments.length - 1];
        const stopped = [];
        addEventListener("securitypolicyviolation", (e) => stopped.push(e.effectiveDirective));
        const image = new Image();
        image.src = "http://127.0.0.1:9/leak.png";
        const inline = document.createElement("script");
        inline.textContent = "window.broken = 3";
        document.body.append(inline);
        fetch("http://127.0.0.1:9/leak").then(
            () => done(["open"]), () => setTimeout(() => done(stopped), 50));
    """
    stopped = page.execute_async_script(script)
    assert {"img-src", "connect-src", "script-src-elem"} <= set(stopped)
    assert ask(page, "window.broken") is None


def test_the_report_of_the_demo(browser, tmp_path):
    """What `ownerwise demo` writes: every figure painted, hover alive, no error, no request."""
    pytest.importorskip("sklearn")
    path = tmp_path / "demo.html"
    folder = tmp_path / "run"
    assert main(["demo", "--quick", "--out", str(path), "--folder", str(folder)]) == 0
    emulate(browser, "light")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for log in ("browser", "performance"):
        browser.get_log(log)  # forget what earlier pages did
    opened(browser, path.as_uri())
    shown = ask(
        browser, "[...document.querySelectorAll('.panel:not([hidden]) .plot')].map(p => p.id)"
    )
    assert {name.rsplit("-", 1)[0] for name in shown} == {
        *("reliability", "learning", "gain", "worst", "trade-off", "spending", "importance")
    }
    for name in shown:
        assert all(points > 0 for _, _, points, _ in traces(browser, name))
        painted = "document.querySelectorAll('#' + arguments[0] + ' .trace path').length"
        assert ask(browser, painted, name) > 0
    point(browser, browser.find_element("css selector", "#learning-0 .nsewdrag"), 0.5, 0.5)
    words = ask(browser, "document.querySelector('#learning-0 .hoverlayer').textContent")
    assert "IDP-SGD" in words
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"].endswith("WillBeSent")]
    assert [url for url in sent if not url.startswith(("file:", "data:", "blob:"))] == []
