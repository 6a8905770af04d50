"""The page in a browser, over the three real processes: an answer that is stopped gives its seat back."""

from __future__ import annotations

import json
from pathlib import Path

import chromium
import pytest
from serving import ROOT, serving
from waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

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
