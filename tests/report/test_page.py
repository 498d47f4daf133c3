"""The page in a real browser: no complaint, no request, filters that filter, and text that stays text."""

from pathlib import Path

import pytest

from lightning_megatron_rl.report.command import write_report
from lightning_megatron_rl.report.embedding import embed
from tests.report.browser import CHROMIUM, Page, browser
from tests.report.runs import healthy, sample, write_facts, write_run, write_samples

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of two runs, whose every text tries to be a script, in a browser."""
    pytest.importorskip("websockets", reason="the DevTools protocol is spoken over websockets")
    directory = tmp_path_factory.mktemp("browser")
    name = "<img src=x onerror=window.attacked=1>"  # a slash cannot be in a name

    def metrics(step: int) -> dict[str, float]:
        return {**healthy(step), f"reward/{ATTACK}": float(step), "moe/load_imbalance": 1.0 + step / 30}

    first = write_run(directory / name, 30, metrics, model={ATTACK: ATTACK})
    write_facts(first, ending=f"stopped by {ATTACK}", table=[[ATTACK, ATTACK]])
    (first / "config.yaml").write_text(ATTACK)
    (first / "run.log").write_text(f"2026-01-01 00:00:00,000 ERROR pkg: {ATTACK}\n")
    samples = {step: [sample(f"{step}", step / 30, cut=step % 2 == 0) for _ in range(4)] for step in range(1, 31)}
    samples[30].append(sample(ATTACK, 2.0, prompt=ATTACK))
    write_samples(first, samples)
    second = write_run(directory / "second", 60)
    file = write_report([first, second], directory / "report.html")
    (directory / "home").mkdir()
    with browser(directory / "home") as opened:
        opened.open(file)
        yield opened


def scroll_through(page: Page) -> None:
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    for place in range(page.evaluate("document.querySelectorAll('.plot').length")):
        page.evaluate(f"document.querySelectorAll('.plot')[{place}].scrollIntoView()")
        page.wait(f"document.querySelectorAll('.plot')[{place}].classList.contains('js-plotly-plot')")


@needs_browser
def test_every_chart_is_drawn_and_nothing_complains_or_asks_for_anything(page):
    scroll_through(page)
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot').length") >= 15
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # at 1280 pixels
    texts = page.evaluate("[...document.querySelectorAll('h2')].map(it => it.textContent)")
    assert texts[:8] == ["Checks", "Reward", "Responses", "Staleness", "Mismatch", "Update", "Routing", "Time"]


@needs_browser
def test_a_page_that_does_ask_for_something_would_be_seen(page, tmp_path):
    """The checks above see errors, and requests that the policy of the page blocks."""
    (tmp_path / "bad.html").write_text("<img src='file:///none.png'><script>nothing.there()</script>")
    before = len(page.complaints)
    url = page.evaluate("location.href")
    page.open(tmp_path / "bad.html")
    page.wait("document.images[0].complete")
    assert len(page.complaints) > before
    del page.complaints[before:]
    page.open(Path(url.removeprefix("file://")))


@needs_browser
def test_no_text_of_a_run_is_run(page):
    scroll_through(page)
    page.fill("text", "</script>")
    page.evaluate("document.querySelector('.sample .head').click()")
    page.wait("document.querySelector('.tokens')")
    assert ATTACK in page.evaluate("document.querySelector('.tokens').textContent")
    page.evaluate("document.querySelectorAll('details').forEach(it => { it.open = true; })")
    assert page.evaluate("document.body.textContent").count("window.attacked") > 6  # it is there, as text
    assert page.evaluate("typeof window.attacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
    page.evaluate("document.getElementById('reset').click()")
    assert page.complaints == []


def shown(page: Page) -> str:
    return page.evaluate("document.getElementById('count').textContent")


@needs_browser
def test_filters_filter(page):
    page.evaluate("document.getElementById('reset').click()")
    assert shown(page) == "121 of 121 samples"
    page.fill("step-from", "5")
    page.fill("step-to", "6")
    assert shown(page) == "8 of 121 samples"
    page.fill("end", "length")
    assert shown(page) == "4 of 121 samples"  # the even step
    assert page.evaluate("document.querySelector('.sample .head').textContent").find("step 6") >= 0
    page.evaluate("document.getElementById('reset').click()")
    page.fill("reward-from", "0.99")
    page.fill("reward-to", "1.5")
    assert shown(page) == "4 of 121 samples"
    page.evaluate("document.getElementById('reset').click()")
    page.fill("text", "ATTACKED")  # in any case
    assert shown(page) == "1 of 121 samples"
    page.evaluate("document.getElementById('reset').click()")
    page.fill("run", "1")
    assert shown(page) == "0 of 121 samples"
    page.evaluate("document.getElementById('reset').click()")
    page.fill("order", "best")
    assert page.evaluate("document.querySelector('.sample .head').textContent").find("reward 2") >= 0
    assert page.evaluate("document.querySelectorAll('.sample').length") == 25
    page.evaluate("document.querySelector('#samples > button').click()")
    assert page.evaluate("document.querySelectorAll('.sample').length") == 50
    page.evaluate("document.getElementById('reset').click()")
    assert page.complaints == []


@needs_browser
def test_a_token_shows_its_logprob(page):
    page.evaluate("document.getElementById('reset').click()")
    page.fill("step-from", "12")
    page.fill("step-to", "12")
    page.evaluate("document.querySelector('.sample .head').click()")
    titles = page.evaluate("[...document.querySelectorAll('.sample.open .token')].map(it => it.title)")
    assert titles == ["token 0: log-prob 0, probability 1", "token 1: log-prob -0.1, probability 0.9"]
    page.evaluate("document.getElementById('reset').click()")


@needs_browser
def test_text_from_right_to_left_does_not_mix_with_the_other(page):
    page.evaluate("document.getElementById('reset').click()")
    texts = page.evaluate("[...document.querySelectorAll('.sample .text')][0].querySelectorAll('bdi').length")
    assert texts == 2


@needs_browser
def test_labels_of_an_axis_are_whole(page):
    """Those of the distribution of rewards, a range each, are wider than numbers."""
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    place = "document.querySelectorAll('.plot')[1]"
    page.evaluate(f"{place}.scrollIntoView()")
    page.wait(f"{place}.querySelector('.ytick text')")
    left = f"Math.min(...[...{place}.querySelectorAll('.ytick text')].map(it => it.getBoundingClientRect().left))"
    assert page.evaluate(f"{left} >= {place}.getBoundingClientRect().left")


@needs_browser
def test_a_narrow_page_is_not_covered_by_its_head(page):
    size = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", width=400, **size)
    try:
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        page.evaluate("document.getElementById('checks').scrollIntoView()")
        assert page.evaluate("document.querySelector('header').getBoundingClientRect().bottom") <= 0
        page.wait("document.documentElement.scrollWidth <= window.innerWidth")  # charts are drawn anew
    finally:
        page.call("Emulation.setDeviceMetricsOverride", width=1280, **size)


@needs_browser
def test_the_switches_hide_lines(page):
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    page.evaluate("document.querySelector('.plot').scrollIntoView()")
    page.wait("document.querySelector('.plot').data")
    visible = "document.querySelector('.plot').data.filter(it => it.visible).map(it => it.meta)"
    assert set(page.evaluate(visible)) == {"raw", "smooth"}
    page.evaluate("document.getElementById('raw').click()")
    page.wait(f"!{visible}.includes('raw')")
    assert set(page.evaluate(visible)) == {"smooth"}
    page.evaluate("document.getElementById('raw').click()")
    page.wait(f"{visible}.includes('raw')")


def test_the_page_names_nothing_outside_itself(tmp_path):
    text = write_report([write_run(tmp_path / "run")]).read_text()
    own = text[: text.index('<script type="application/json"')] + text[text.rindex("<script nonce") :]
    assert "http://" not in own
    assert "https://" not in own
    assert "default-src 'none'" in own
    assert " src=" not in own


def test_a_metric_that_was_no_number_is_not_called_constant(tmp_path):
    def metrics(step: int) -> dict[str, float]:
        infinite = float("inf") if step > 20 else 1.0
        return {"policy/grad_norm": infinite, "policy/loss": float("nan"), "policy/lr": 0.5}

    text = write_report([write_run(tmp_path / "run", 30, metrics)]).read_text()
    assert "Constant: policy/lr 0.5." in text
    assert "<h3>policy/grad_norm</h3>" in text
    assert text.count("No value is a finite number.") == 1  # of the loss, which has nothing to draw


def test_embedded_text_ends_no_script():
    assert not set(embed({ATTACK: [ATTACK, float("nan")]})) & set("<>&")
