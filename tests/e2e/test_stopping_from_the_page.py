"""The page in a browser, over the three real processes: an answer that is stopped gives its seat back, and what two
policies attend is drawn."""

from __future__ import annotations

import json
import os
from pathlib import Path

import chromium
import pytest
from serving import ROOT, serving
from waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REQUEST = ROOT / "examples" / "documents" / "request.json"
FACT = "48213"
FIND = """(async () => {
  const strip = panes[0].strip, size = strip.picture.bucket_tokens;
  for (let at = 0; at < strip.size; at++)
    if ((await strip.textOf(at * size, (at + 1) * size)).includes('%s')) return at;
  return -1;
})()"""
POLICIES = ("pqcache", "bitkeys")
BOOK = ROOT / "examples" / "documents" / "voyage-of-the-beagle.txt"


def test_a_stopped_answer_frees_its_seat(tmp_path: Path) -> None:
    if chromium.find() is None:
        pytest.skip(f"needs a browser: one of {', '.join(chromium.NAMES)}")
    with serving() as server, chromium.browsing(tmp_path / "profile") as tab:
        tab.open(server.url)
        tab.wait("document.querySelector('.pane')")
        tab.run(f"take('book.txt', {json.dumps(BOOK.read_text()[:8000])})")
        tab.run("document.querySelector('.policy').value = 'pqcache'")
        tab.run("document.querySelector('#question').focus()")
        tab.type("Write down all of it again.")
        tab.press("Enter", 13)
        # The picture is live while the answer comes.
        tab.wait("panes[0].strip.picture?.step > 3 && document.querySelector('.going')")
        picture = tab.run("panes[0].strip.picture")
        assert (picture["policy"], picture["family"]) == ("pqcache", "recall")
        assert 0 < picture["hit_rate"] <= 1
        assert picture["attended"][0] == 1
        assert min(picture["on_device"]) < 1
        assert server.worker_stats().running == 1
        tab.press("Escape", 27)
        tab.wait("document.querySelector('[data-ended=stopped]')")
        wait_until(lambda: (stats := server.worker_stats()).running == 0 and stats.slot_used_tokens == 0)
        assert server.worker_stats().requests_aborted_total == 1
        assert tab.complaints == []


def test_two_policies_draw_where_a_document_of_8k_tokens_is(tmp_path: Path) -> None:
    """`PICTURE=FILE` keeps what is seen, which README shows."""
    if chromium.find() is None:
        pytest.skip(f"needs a browser: one of {', '.join(chromium.NAMES)}")
    [message] = json.loads(REQUEST.read_text())["messages"]
    document, question = message["content"].rsplit("\n\n", 1)
    with serving() as server, chromium.browsing(tmp_path / "profile") as tab:
        tab.look(1320, 770)
        tab.open(server.url)
        tab.wait("document.querySelector('.pane')")
        tab.run(f"take('voyage-of-the-beagle.txt', {json.dumps(document)})")
        tab.run("document.querySelector('#compare').click()")
        for place, policy in enumerate(POLICIES):
            tab.run(f"document.querySelectorAll('.policy')[{place}].value = '{policy}'")
        tab.run("document.querySelector('#question').focus()")
        tab.type(question)
        tab.press("Enter", 13)
        tab.wait("document.querySelectorAll('[data-ended=stop]').length === 2", 600)
        at = tab.run(FIND % FACT)
        assert at > 0
        for place in range(len(POLICIES)):
            tab.run(f"panes[{place}].strip.point({at})")
        tab.wait(
            f"[...document.querySelectorAll('.inspect q')].every((one) => one.textContent.includes('{FACT}'))"
        )
        pictures = tab.run("panes.map((pane) => pane.strip.picture)")
        assert [picture["policy"] for picture in pictures] == list(POLICIES)
        for picture in pictures:
            assert 8000 < picture["context_tokens"] < 8200
            # the sentence that answers is attended more than most of the document
            assert picture["attended"][at] > sorted(picture["attended"])[len(picture["attended"]) // 2]
        assert tab.complaints == []
        if file := os.environ.get("PICTURE"):
            tab.run("document.activeElement.blur()")
            tab.screenshot(Path(file))
