"""The page of a plan, its pictures and its tables: the plan's own numbers, readable at any width and in both themes."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import budgetopt
from budgetopt import BudgetOptError, Plan
from budgetopt._curve import over_step
from budgetopt._page import page, write_report
from budgetopt._slices import highest, tops
from budgetopt._units import show_bytes, show_ns
from budgetopt.solvers import Choice, Segment
from tests.models import mlp_stack
from tests.plans import forced_plan

EXACT = ("keep", "recompute")
NAME = '<script>alert("x")</script>&amp;'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def named(depth: int = 4) -> tuple[nn.Module, Any]:
    """Layers whose names are HTML."""
    stack, sample = mlp_stack(depth)
    model = nn.Sequential()
    model.add_module(NAME, stack)
    return model, sample


@cache
def plans() -> dict[str, Plan]:
    """One of each sort: run, not run, with nothing dropped, with fp16, with a segment."""
    model, sample = named()
    profile = budgetopt.profile(model, sample)
    budgetopt.fit(model, sample, (profile.fixed.total + profile.peak_bytes) // 2, allow=EXACT)
    fitted = budgetopt.plan_of(model)
    assert fitted is not None and fitted.measured is not None and fitted.drops
    every = {"fitted": fitted, "not run": fitted.model_copy(update={"measured": None})}
    every["kept"] = budgetopt.solve(profile, 2 * profile.peak_bytes)
    every["fp16"] = forced_plan(profile, lambda v: Choice.FP16)
    every["segment"] = forced_plan(profile, lambda v: Choice.KEEP, [Segment(0, 2)])
    assert not every["kept"].drops and every["fp16"].halves and every["segment"].regions[0].segments
    return every


class Page(HTMLParser):
    """The words of a page, by the element that they are in, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen: set[str] = set()
        self.words: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [f"{name}={value}" for name, value in attributes if name in ("src", "href", "srcset", "style")]
        if tag not in ("meta", "rect", "line", "polygon", "polyline", "path"):
            self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.tags:
            assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append((self.tags[-1], data.strip()))
            if self.rows and {"td", "th"} & set(self.tags):
                self.rows[-1][-1] += data.strip()

    def facts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for tag, word in self.words:
            if tag == "dt":
                found[word] = []
            elif tag == "dd":
                found[list(found)[-1]].append(word)
        return found


def test_slices_by_hand() -> None:
    sizes = [10, -10, 20, 5, -5, 5, -25]  # levels 0 10 0 20 25 20 25 0, taken 0 10 10 30 35 35 40 40
    assert tops(sizes, 2) == [1, 4] and highest(sizes, 2) == (10, 25)
    assert highest(sizes, 4) == (0, 10, 0, 25)  # 20 more at once: they fill the third slice and end in the last
    assert highest([], 5) == (0,) and highest([7], 5) == (7,)


@pytest.mark.parametrize("sort", ["fitted", "kept", "fp16", "segment"])
def test_what_fills_the_memory_adds_up_to_the_referees_peak(sort: str) -> None:
    plan = plans()[sort]
    profile = plan.profile
    curve = over_step(profile, plan.choices(profile), plan.segments(profile))
    assert max(curve.total) == plan.predicted.peak_bytes == curve.total[curve.peak]
    assert [sum(sizes) for sizes in zip(*curve.groups.values(), strict=True)] == list(curve.total)
    activations = [sizes for what, sizes in curve.groups.items() if what.startswith("activations")]
    by_group = [sum(sizes) for sizes in zip(*activations, strict=True)]
    assert [sum(sizes) for sizes in zip(*curve.layers.values(), strict=True)] == by_group
    assert set(curve.groups["parameters and buffers"]) == {profile.fixed.parameter + profile.fixed.buffer}
    assert set(curve.groups["optimizer's state"]) == {profile.fixed.optimizer}
    assert ("activations in fp16" in curve.groups) == (sort == "fp16")
    assert ("activations made again" in curve.groups) == (sort in ("fitted", "segment"))
    assert {f"{NAME}.{number}" for number in range(4)} <= set(curve.layers) and 0.2 < curve.turn < 0.8


def test_the_measured_curve_has_the_measured_peak() -> None:
    measured = plans()["fitted"].measured
    assert measured is not None
    assert max(measured.curve) == measured.peak_bytes and 20 < len(measured.curve) <= 400
    assert min(measured.curve) >= plans()["fitted"].predicted.resident_bytes


def test_a_plan_of_an_older_version_still_has_its_seal(tmp_path: Path) -> None:
    plan = plans()["fitted"]
    assert plan.measured is not None
    old = plan.model_copy(update={"measured": plan.measured.model_copy(update={"curve": ()})})
    for made in (plan, old):
        made.save(tmp_path / "plan.json")
        assert ('"curve"' in (tmp_path / "plan.json").read_text()) == (made is plan)
        assert Plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize("sort", ["fitted", "not run", "kept", "fp16", "segment"])
def test_a_page_says_what_the_plan_says(sort: str) -> None:
    plan = plans()[sort]
    text = page(plan)
    found = Page(text)
    facts, predicted = found.facts(), plan.predicted
    assert facts["budget"][0] == show_bytes(plan.budget_bytes)
    assert facts["predicted peak"] == [show_bytes(predicted.peak_bytes), f"{predicted.peak_bytes} bytes"]
    assert facts["peak of the plain step"][0] == show_bytes(predicted.plain_peak_bytes)
    expected = f"{100 * predicted.overhead:+.1f}%" if predicted.extra_ns else "none"
    assert facts["extra time, predicted"][0] == expected
    assert facts["solver"] == [part for part in (plan.solver, plan.status) if part]
    assert facts["gap"][0] == (f"{100 * plan.gap:.1f}%" if plan.gap < 1 else "not proven")
    assert facts["torch"] == [plan.environment.torch]
    if plan.measured:
        assert facts["measured peak"][0] == show_bytes(plan.measured.peak_bytes)
    else:
        assert facts["measured peak"][0] == "not measured" and "measured, " not in text
    assert facts["gradients"][0].startswith("fp16" if plan.halves else "exact")
    assert ("code", predicted.peak_at) in found.words
    layers = [row for row in found.rows if row[0].startswith(NAME)]
    assert [row[0] for row in layers] == [f"{NAME}.{number}" for number in range(4)]
    for row, region in zip(layers, plan.regions, strict=False):
        sizes = {word: sum(d.bytes for d in region.decisions if d.choice == word) for word in ("recompute", "late")}
        if not plan.halves:
            assert row[6] == show_bytes(sum(sizes.values()))
    total = sum(plan.profile.fixed.model_dump().values())
    uses = {row[0]: row[1] for row in found.rows}
    assert total == predicted.resident_bytes
    assert uses["optimizer's state"] == show_bytes(plan.profile.fixed.optimizer)


def test_a_page_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    plan = plans()["fitted"]
    plan.save(tmp_path / "plan.json")
    found = Page(text := page(Plan.load(tmp_path / "plan.json")))
    assert text == page(plan) and text.startswith("<!DOCTYPE html>") and found.tags == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & found.seen
    assert not any(word in text for word in ("http:", "https:", "url(", "@import", "//", "<script"))
    assert all(link.startswith("style=") for link in found.links)
    assert text.count("&lt;script&gt;") >= 4


def test_replay_times_are_those_of_the_table() -> None:
    plan = plans()["fitted"]
    replays = {row[0]: row[7] for row in Page(page(plan)).rows if row[0].startswith(NAME)}
    table = Page(plan._repr_html_()).rows[1:]
    assert len(table) == len(plan.regions) and all(replays[row[0]] == row[5] for row in table)


def test_tables_for_notebooks() -> None:
    plan = plans()["fitted"]
    for shown, text in ((plan, plan._repr_html_()), (plan.profile, plan.profile._repr_html_())):
        found, printed = Page(text), " ".join(str(shown).split())
        assert found.tags == [] and "script" not in found.seen and len(found.rows) > 3
        assert all(cell in printed for cell in found.rows[0])
    head = Page(plan._repr_html_()).words[0][1]
    assert plan.measured is not None and show_bytes(plan.measured.peak_bytes) in head
    layers = {layer.path: show_ns(layer.forward_ns) for layer in plan.profile.layers}
    assert next(row[3] for row in Page(plan.profile._repr_html_()).rows[1:]) in layers.values()


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = plans()["fitted"], tmp_path / "report.html"
    plan.report(path)
    assert path.read_text(encoding="utf-8") == page(plan) and list(tmp_path.iterdir()) == [path]
    with pytest.raises(BudgetOptError, match="points=1"):
        write_report(plan, path, 1)
    with pytest.raises(BudgetOptError, match="choose a folder that exists"):
        write_report(plan, tmp_path / "nowhere" / "report.html", 4)
    write_report(plan, path, 2)
    found = Page(path.read_text(encoding="utf-8"))
    rows = next(found.rows[at + 1 :] for at, row in enumerate(found.rows) if row[0] == "budget")
    points = budgetopt.frontier(plan.profile, points=2, allow=plan.allow)
    assert [row[0] for row in rows] == [show_bytes(point.budget_bytes) for point in points]


@pytest.mark.parametrize("ending, start", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures_as_files(tmp_path: Path, ending: str, start: bytes) -> None:
    path = tmp_path / f"memory{ending}"
    plans()["fp16" if ending == ".png" else "fitted"].plot(path)
    assert path.read_bytes().startswith(start) and list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BudgetOptError, match=r"plot '.*x.txt': give a name that ends in .png"):
        plans()["kept"].plot(tmp_path / "x.txt")
    assert not list(tmp_path.iterdir())


LOOK = """
const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
  .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
function behind(view, e) {
  for (; e; e = e.parentElement) {
    const c = view.getComputedStyle(e).backgroundColor;
    if (c !== 'transparent' && !/, 0\\)$/.test(c)) return c;
  }
  return 'rgb(255, 255, 255)';
}
function look(frame) {
  const view = frame.contentWindow, doc = view.document, texts = [], faint = [], overlaps = [], cut = [];
  const walk = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walk.nextNode();) {
    const e = node.parentElement;
    if (!node.data.trim() || e.closest('caption')) continue;
    const [a, b] = [light(view.getComputedStyle(e).color), light(behind(view, e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push([node.data.trim(), ratio]);
    const range = doc.createRange(), box = e.closest('.box');
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      let [x, y, right, bottom] = [r.left, r.top, r.right, r.bottom];
      if (box) {
        const o = box.getBoundingClientRect();
        [x, y] = [Math.max(x, o.left), Math.max(y, o.top)];
        [right, bottom] = [Math.min(right, o.right), Math.min(bottom, o.bottom)];
      }
      if (right - x < 1 || bottom - y < 1) continue;
      if (x < 0 || right > view.innerWidth) cut.push(node.data.trim());
      for (const t of texts)
        if (t.node !== node && Math.min(right, t.right) - Math.max(x, t.x) > 1
            && Math.min(bottom, t.bottom) - Math.max(y, t.y) > 3)
          overlaps.push([node.data.trim(), t.node.data.trim()]);
      texts.push({node, x, y, right, bottom});
    }
  }
  return {width: view.innerWidth, scroll: doc.documentElement.scrollWidth, texts: texts.length, faint, overlaps, cut,
    paper: view.getComputedStyle(doc.body).backgroundColor};
}
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(look);
  document.body.textContent = JSON.stringify(found);
});
"""


def looked_at(text: str, folder: Path, theme: int) -> list[dict[str, Any]]:
    """What a browser makes of a page, 390 and 1280 pixels wide; `theme`: 0 is dark, 1 is light."""
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(text)}"></iframe>'
        for width in (390, 1280)
    )
    around = folder / "around.html"
    around.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><script>{LOOK}</script>'
        f"<body>{frames}</body>",
        encoding="utf-8",
    )
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    quiet += "--disable-component-update --disable-sync --window-size=1400,1000"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *quiet.split(),
            f"--blink-settings=preferredColorScheme={theme}",
            f"--user-data-dir={folder / 'browser'}",
            "--dump-dom",
            around.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    body = done.stdout.partition("<body>")[2].partition("</body>")[0]
    found: list[dict[str, Any]] = json.loads(unescape(body))
    return found


def browsable() -> str:
    """A page with everything on it."""
    plan = plans()["fitted"]
    return page(plan, budgetopt.frontier(plan.profile, points=2, allow=plan.allow))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("theme, paper", [(0, "rgb(20, 24, 29)"), (1, "rgb(255, 255, 255)")])
def test_a_browser_shows_all_of_it(tmp_path: Path, theme: int, paper: str) -> None:
    phone, desktop = looked_at(browsable(), tmp_path, theme)
    for found, width in ((phone, 390), (desktop, 1280)):
        assert found["width"] == width >= found["scroll"] and found["paper"] == paper and found["texts"] > 100
        assert found["faint"] == [] and found["overlaps"] == [] and found["cut"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_browser_would_find_what_is_wrong(tmp_path: Path) -> None:
    wrong = browsable().replace(
        "<main>",
        '<main><p style="color: #999999; background: #ffffff">pale</p><p style="margin-bottom: -20px">under</p>'
        '<p>over</p><p style="width: 2000px; white-space: nowrap; margin-left: 1270px">far out</p>',
    )
    for found in looked_at(wrong, tmp_path, 1):
        assert [text for text, _ in found["faint"]] == ["pale"] and ["over", "under"] in found["overlaps"]
        assert found["cut"] == ["far out"] and found["scroll"] > found["width"]
