from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.demo.recorded import MOVIELENS, record
from tidemill.demo.report_html import build_page, render
from tidemill.errors import NotFoundError


class _Page(HTMLParser):
    """Tags, sources and text of a page; fails on tags that aren't closed in their order."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _parse(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def test_the_page_holds_its_plots_and_figures_and_needs_nothing_else(tmp_path: Path) -> None:
    record(tmp_path)
    text = render(tmp_path).read_text(encoding="utf-8")
    page = _parse(text)
    assert [source[:22] for source in page.sources] == ["data:image/png;base64,"] * 3
    for name, source in zip(("auc.png", "freshness.png", "handover.png"), page.sources, strict=True):
        assert base64.b64decode(source.partition(",")[2]) == (tmp_path / name).read_bytes()
    assert "http" not in re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    for shown in ("5,126", "0.7383", "0.6689", "55 %", "1.06 s", "lineages/20260303", "133,276", "60,130", "killed 1 time"):
        assert shown in page.text, shown
    assert "Everything is as it must be." in page.text


def test_each_figure_in_the_table_says_how_it_is_computed(tmp_path: Path) -> None:
    rows = re.findall(
        r"<tr><th>(.*?)</th><td class=\"value\">(.*?)</td><td class=\"how\">(.*?)</td></tr>", build_page(record(tmp_path), [])
    )
    assert len(rows) > 30
    assert all(value and how.endswith(".") for _, value, how in rows)


def test_a_failed_demo_says_why_and_escapes_it(tmp_path: Path) -> None:
    page = build_page(record(tmp_path, ok=False, failures=["3 of 9 requests <failed>"], error="DeadlineError: late"), [])
    assert "3 of 9 requests &lt;failed&gt;; DeadlineError: late" in page
    assert "as it must be." not in page


def test_a_demo_that_was_stopped_early_still_gives_a_page(tmp_path: Path) -> None:
    record(
        tmp_path,
        ok=False,
        error="stopped",
        auc=dict.fromkeys(("served", "online", "frozen", "best_possible")),
        share_closed=None,
        freshness_s={"p50": None, "p99": None},
        rows={"undelivered": 0},
    )
    (tmp_path / "series.json").write_text('{"auc": [], "lineages": [], "handover": [], "kills": []}', encoding="utf-8")
    page = _parse(render(tmp_path).read_text(encoding="utf-8"))
    assert page.sources == []
    assert "None" not in page.text


def test_movielens_shows_blocks_interval_and_terms(tmp_path: Path) -> None:
    record(tmp_path, movielens=MOVIELENS, data={"name": "movielens", "terms": "Terms & conditions"})
    text = render(tmp_path).read_text(encoding="utf-8")
    page = _parse(text)
    assert (tmp_path / "movielens.png").read_bytes()[:4] == b"\x89PNG"
    assert "+0.0300 to +0.0500" in page.text
    assert "Terms & conditions" in page.text


def test_without_a_report_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"report\.json"):
        render(tmp_path)
