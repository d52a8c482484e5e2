"""The HTML page, as text and in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfinder.memory_use.breakdown import OverTime, bytes_over_time
from batchfinder.report.page import PageCell, page_of
from batchfinder.results import Rate, Throughput
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import GIB, MIB

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>document.title='run'</script><!--@data@ & <b>"
CHANGES = [
    {"change": "", "batch_size": 8, "peak_bytes": 3 * GIB, "max_batch_size": 8, "error": None},
    {"change": "--precision bf16-mixed", "batch_size": 8, "peak_bytes": 2 * GIB, "max_batch_size": 13, "error": None},
    {"change": "--attention flash", "batch_size": 8, "peak_bytes": None, "max_batch_size": None, "error": "refused"},
]


RATES = tuple(Rate(size, rate, 0.02) for size, rate in ((16, 900.0), (32, 1500.0), (64, 1980.0), (128, 2000.0)))


def over_time(events: int = 2000) -> OverTime:
    """Blocks of 1 MiB that come and then go, in two stages; at the middle one of 1 GiB is there for one event."""
    half = events // 2
    order = [*range(half), half, ~half, *(~block for block in reversed(range(half)))]
    count = half + 1
    structure = TraceStructure(
        order=tuple(order),
        marks=(StageMark(0, 0, "forward"), StageMark(half + 1, 0, "backward")),
        operators=("aten.mm.default",) * count,
        modules=("layer.0",) * half + ("head",),
        kinds=("activation",) * half + ("temporary",),
    )
    return bytes_over_time(Trace(1, None, structure, (MIB,) * half + (GIB,)))


def cells() -> list[PageCell]:
    """Two models on three GPUs at two lengths, by two techniques; the first has all that a cell may have."""
    found = []
    for model in ("bert-base", "gpt2"):
        for number, gpu in enumerate(("T4", "V100", HOSTILE)):
            for seq_len in (128, 512):
                for technique in ("fp32, adamw", "bf16-mixed, adamw"):
                    size = 40 * (number + 1) * 512 // seq_len + (technique[0] == "b") + (model == "gpt2") * 1000
                    found.append(
                        PageCell(
                            model, gpu, seq_len, technique, size, f"{model} at {seq_len} on {gpu}",
                            peak_bytes=GIB, usable_bytes=2 * GIB, facts=[("largest batch", str(size))],
                            unmodelled=[HOSTILE], over_time=over_time(), kinds={"parameters": GIB, "gradients": MIB},
                            changes=CHANGES, throughput=Throughput(64, 128, RATES, model == "bert-base", 5, 0.004),
                        )
                    )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def page() -> str:
    """The page of these cells."""
    return page_of(HOSTILE, "some conditions", cells())


def data_of(page: str) -> dict[str, Any]:
    """The figures in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    read: dict[str, Any] = json.loads(found.group(1))
    return read


def test_the_figures_are_in_the_page_whatever_their_names(page: str) -> None:
    """Texts come through as they are, and none of them is markup."""
    data = data_of(page)
    assert [cell["gpu"] for cell in data["cells"]] == [cell.gpu for cell in cells()]
    assert data["cells"][0]["unmodelled"] == [HOSTILE]
    assert page.count("document.title='run'</script>") == 0
    assert "@style@" not in page
    assert len(page) < 5_000_000


def test_a_timeline_keeps_its_peak_with_fewer_points(page: str) -> None:
    """Of 2,002 events 300 are shown, among them the one at which most is held."""
    timeline = data_of(page)["cells"][0]["timeline"]
    assert len(timeline["positions"]) == 300
    totals = [sum(held) for held in zip(*timeline["by_kind"].values(), strict=True)]
    assert max(totals) == (1000 * MIB + GIB) // timeline["unit"]
    assert timeline["names"][timeline["modules"][totals.index(max(totals))]] == "head"


def test_a_page_of_very_many_cells_stays_small() -> None:
    """Of 2,000 cells no memory over time is shown, which is said; of 500 with fewer points."""
    one = replace(cells()[0], over_time=over_time(300))
    some = page_of("some", "some", [one] * 500)
    assert len(some) < 5_000_000
    assert len(data_of(some)["cells"][0]["timeline"]["positions"]) == 80
    many = page_of("many", "some", [one] * 2000)
    assert len(many) < 5_000_000
    assert data_of(many)["cells"][0]["timeline"] is None
    assert "sweep fewer at a time" in data_of(many)["conditions"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium without a window, and without a network to the page."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as started:
        yield started


@pytest.fixture
def opened(browser: Any, page: str, tmp_path: Path) -> Any:
    """The page, with everything drawn, at 1280 by 900."""
    return open_page(browser, page, tmp_path)


def open_page(browser: Any, page: str, folder: Path) -> Any:
    """The same for any page."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    browser.set_window_size(1280, 900)
    browser.get(file.as_uri())
    wait_until_drawn(browser)
    return browser


def wait_until_drawn(browser: Any) -> None:
    """Until all charts are there."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 60).until(lambda each: each.execute_script("return document.documentElement.dataset.ready"))


def errors(browser: Any) -> list[str]:
    """What the browser complained of since it was asked last."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def rows(browser: Any) -> list[list[str]]:
    """The table of cells, as it is shown."""
    script = "return [...document.querySelectorAll('#table tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    found: list[list[str]] = browser.execute_script(script)
    return found


def test_it_loads_without_errors_and_without_a_network(opened: Any) -> None:
    """All parts are drawn, nothing is fetched, and no text was taken for markup."""
    assert errors(opened) == []
    assert opened.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert opened.title == " ".join(HOSTILE.split())
    assert len(rows(opened)) == 24
    for chart in ("sizes", "timeline", "kinds", "changes", "speed"):
        assert opened.find_element("css selector", f"#{chart} svg").size["height"] > 40, chart


def test_the_table_is_sorted_and_filtered(opened: Any) -> None:
    """By the buttons in its head, up and down; by model and technique together, the heat map with it."""
    from selenium.webdriver.support.select import Select

    head = "#table th:nth-child(5) button"
    for order, sign in (("ascending", 1), ("descending", -1)):
        opened.find_element("css selector", head).click()
        sizes = [int(row[4].replace(",", "")) for row in rows(opened)]
        assert sizes == sorted(sizes, key=lambda size: sign * size)
        assert opened.find_element("css selector", "#table th:nth-child(5)").get_attribute("aria-sort") == order
        assert opened.switch_to.active_element.text == "max batch"
    Select(opened.find_element("id", "filter-model")).select_by_visible_text("gpt2")
    Select(opened.find_element("id", "filter-technique")).select_by_visible_text("fp32, adamw")
    assert {(row[0], row[3]) for row in rows(opened)} == {("gpt2", "fp32, adamw")}
    assert opened.find_element("id", "count").text == "6 of 24 cells"
    drawn = "return document.querySelectorAll('#sizes rect').length"
    assert opened.execute_script(drawn) == 6
    assert errors(opened) == []


ROWS = """
return [...document.querySelectorAll('#sizes rect')].map((bar, i) => [
    [...document.querySelectorAll("#sizes text[text-anchor=end]")[i].children].map(line => line.textContent),
    Number(bar.getAttribute("width")), bar.getAttribute("aria-label")])
"""


def test_one_length_is_drawn_as_bars(browser: Any, tmp_path: Path) -> None:
    """As long as the sizes are large, with labels that go on in another line rather than being cut."""
    one = [replace(cell, gpu=f"{cell.gpu} {'of a long name ' * 8}") for cell in cells()[::2] if cell.seq_len == 128]
    opened = open_page(browser, page_of("one", "", one), tmp_path)
    drawn = opened.execute_script(ROWS)
    assert len(drawn) == len(one) == 6
    longest = max(width for _, width, _ in drawn)
    most = max(cell.batch_size for cell in one)
    for cell, (lines, width, described) in zip(one, drawn, strict=True):
        assert len(lines) > 1
        assert "".join(lines).replace(" ", "") == f"{cell.model}, {cell.gpu}".replace(" ", "")
        assert width == pytest.approx(longest * cell.batch_size / most, abs=1.5)
        assert described.endswith(f"seq len 128: {cell.batch_size:,}")
    assert "largest batch at 128" in opened.find_element("id", "sizes").text
    assert errors(opened) == []


def test_a_mark_is_chosen_and_says_what_it_is(opened: Any) -> None:
    """Under the pointer, with the figure and its peak; a click shows the details of its cell."""
    from selenium.webdriver.common.action_chains import ActionChains

    mark, tip = opened.find_elements("css selector", "#sizes rect")[3], opened.find_element("id", "tip")
    assert not tip.is_displayed()
    ActionChains(opened).move_to_element(mark).perform()
    assert tip.text.splitlines() == [
        "bert-base, T4, bf16-mixed, adamw", "seq len: 512", "max batch: 41", "peak reserved: 1.00 GiB"
    ]  # fmt: skip
    ActionChains(opened).move_to_element_with_offset(mark, 0, 0).click().perform()
    assert opened.find_element("id", "cell-heading").text == "bert-base at 512 on T4"
    assert opened.find_elements("css selector", "#table tr[aria-current=true]")[0].get_attribute("data-cell") == "3"


def test_charts_are_as_wide_as_the_window(opened: Any) -> None:
    """They are drawn anew where it changes, at the moment that was looked at."""
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    opened.find_element("id", "position").send_keys(Keys.HOME)
    seen, before = opened.find_element("id", "moment").text, opened.find_element("css selector", "#timeline svg").size
    opened.set_window_size(900, 900)
    WebDriverWait(opened, 10).until(
        lambda each: each.find_element("css selector", "#timeline svg").size["width"] < before["width"] - 300
    )
    assert opened.find_element("id", "moment").text == seen
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_a_cell_is_chosen_by_keyboard_and_its_memory_read(opened: Any) -> None:
    """Enter on a row's button shows its details and moves there; arrow keys move through its memory."""
    from selenium.webdriver.common.keys import Keys

    button = opened.find_element("css selector", "#table tbody tr:nth-child(4) button")
    button.send_keys(Keys.ENTER)
    assert opened.switch_to.active_element.text == "bert-base at 512 on T4"
    chosen = opened.find_elements("css selector", "#table tr[aria-current=true]")
    assert [row.get_attribute("data-cell") for row in chosen] == ["3"]
    moment, slider = opened.find_element("id", "moment"), opened.find_element("id", "position")
    assert moment.text == "step 0, forward, head: 1.98 GiB in tensors (the peak)"
    slider.send_keys(Keys.HOME)
    assert moment.text.startswith("step 0, forward, layer.0: ")
    assert slider.get_attribute("aria-valuetext") == moment.text
    slider.send_keys(Keys.END)
    assert moment.text.startswith("step 0, backward, layer.0: ")
    assert errors(opened) == []


def test_the_pointer_moves_through_the_memory(opened: Any) -> None:
    """What is held is that of the place under the pointer."""
    from selenium.webdriver.common.action_chains import ActionChains

    picture = opened.find_element("css selector", "#timeline svg")
    moment = opened.find_element("id", "moment")
    ActionChains(opened).move_to_element_with_offset(picture, picture.size["width"] // 4, 0).perform()
    assert "backward" in moment.text
    ActionChains(opened).move_to_element_with_offset(picture, -picture.size["width"] // 4, 0).perform()
    assert "forward" in moment.text


def test_speed_and_its_spread(opened: Any) -> None:
    """The smallest size at full speed stands out among the sizes that were timed, unless it cannot be told."""
    assert opened.find_element("id", "speed-words").text.startswith("full speed from 64 on, at 1,980 ± 2.0 %")
    chosen = "#speed-table tr[aria-current]"
    assert opened.find_element("css selector", chosen).text == "64 1,980 2.0 %"
    assert len(opened.find_elements("css selector", "#speed circle")) == 5
    button = opened.find_elements("css selector", "#table tbody button")[12]
    opened.execute_script("arguments[0].click()", button)
    assert opened.find_element("id", "speed-words").text.startswith("full speed: cannot tell")
    assert not opened.find_elements("css selector", chosen)
    assert errors(opened) == []


def test_light_and_dark(opened: Any) -> None:
    """The button goes through the system's colours, light and dark; charts are drawn in them."""
    button = opened.find_element("id", "theme")
    paper = "return getComputedStyle(document.body).backgroundColor"
    label = "return getComputedStyle(document.querySelector('#changes .label')).fill"
    seen = []
    for name in ("light", "dark", "system"):
        button.click()
        assert button.text == f"colours: {name}"
        wait_until_drawn(opened)
        seen.append((opened.execute_script(paper), opened.execute_script(label)))
    light, dark, system = seen
    assert light != dark
    assert light[1] != dark[1]
    assert system in (light, dark)
    assert errors(opened) == []


def test_a_narrow_window(opened: Any) -> None:
    """At 400 pixels nothing but tables goes beyond the edge, and these scroll by themselves."""
    # A window cannot be made as narrow.
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        opened.refresh()
        wait_until_drawn(opened)
        wide = """
        const parts = document.querySelectorAll("header p, footer p");
        for (const part of parts) part.textContent = "a/long/path/".repeat(20);
        return document.documentElement.scrollWidth"""
        assert opened.execute_script(wide) <= 400
        assert errors(opened) == []
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_a_screen_reader_is_told(opened: Any) -> None:
    """Every control has a name, each table its heads, and each mark of the heat map says what it stands for."""
    unnamed = """
    return [...document.querySelectorAll('button, select, input')].filter(
        each => !(each.innerText || each.labels?.length || each.getAttribute('aria-label'))).length"""
    assert opened.execute_script(unnamed) == 0
    described = opened.find_elements("css selector", "#sizes rect[aria-label]")
    assert len(described) == 24
    assert "bert-base on T4, seq len 128: 160" in {each.get_attribute("aria-label") for each in described}
    assert opened.execute_script("return document.querySelectorAll('table td:not(.number)[scope]').length") == 0
    assert opened.execute_script("return document.documentElement.lang") == "en"
