"""The page at `/`: what it may do, and in a browser what it does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import httpx
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack
from test_attention_endpoint import sight
from waiting import wait_until

ENTER, ESCAPE, RIGHT, END = ("Enter", 13), ("Escape", 27), ("ArrowRight", 39), ("End", 35)
ANSWER = "document.querySelector('.turn:last-child p')"


def test_the_page_is_one_file_that_may_load_nothing_else(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"(?:src|href)=\"(?!data:,)|https?://|@import| on\w+=| style=", response.text)


def test_the_page_needs_no_key_and_can_be_turned_off(
    locked_stack: Stack, tmp_path: Path, model_dir: Path
) -> None:
    assert httpx.get(locked_stack.url).status_code == 200
    assert httpx.get(f"{locked_stack.url}/v1/models").status_code == 401
    with running_stack(tmp_path, model_dir, disable_docs=True) as stack:
        assert httpx.get(stack.url).status_code == 404


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[chromium.Tab]:
    if chromium.find() is None:
        pytest.skip(f"needs a browser: one of {', '.join(chromium.NAMES)}")
    with chromium.browsing(tmp_path / "profile") as tab:
        yield tab
        # nor did its own rules forbid it anything
        assert tab.complaints == []


def ask(tab: chromium.Tab, question: str) -> None:
    tab.run("document.querySelector('#question').focus()")
    tab.type(question)
    tab.press(*ENTER)


@pytest.mark.slow
def test_an_answer_is_shown_as_it_comes_and_stopped(tab: chromium.Tab, stack: Stack) -> None:
    script = stack.say("the quick brown fox " * 10, hang_at=12)
    tab.open(stack.url)
    tab.wait("document.querySelector('.pane')")
    ask(tab, "which fox?")
    tab.wait(f"{ANSWER}.textContent.includes('the quick')")
    assert stack.service.admission.num_running == 1
    tab.press(*ESCAPE)
    tab.wait("document.querySelector('[data-ended=stopped]')")
    wait_until(lambda: script.num_cancelled == 1)
    wait_until(lambda: stack.service.admission.num_running == 0)
    # What there was of the answer is part of the conversation.
    stack.say("lazy")
    ask(tab, "and the dog?")
    tab.wait("document.querySelector('[data-ended=stop]')")
    roles = tab.run("panes[0].turns.map((turn) => turn.role).join()")
    assert roles == "user,assistant,user,assistant"


@pytest.mark.slow
def test_what_an_answer_waits_for_is_told_until_it_begins(tab: chromium.Tab, stack: Stack) -> None:
    script = stack.say("the fox", is_silent=True, is_held=True)
    tab.open(stack.url)
    tab.wait("document.querySelector('.pane')")
    tab.run("take('fox.txt', 'the quick brown fox jumps')")
    ask(tab, "who?")
    state = "document.querySelector('.turn.going h2 span')"
    tab.wait(f"{state}?.textContent === 'waiting for its turn'")
    wait_until(lambda: script.requests)
    size = len(script.requests[0].prompt_token_ids)
    script.progress = [(size // 2, 0)]
    script.is_silent = False
    tab.wait(f"{state}.textContent === 'reading, {round(100 * (size // 2) / size)} %'")
    script.is_held = False
    tab.wait("document.querySelector('[data-ended=stop]')")
    assert tab.run("document.querySelector('.turn:last-child h2').textContent") == "Carrel"


@pytest.mark.slow
def test_what_is_attended_is_drawn_and_read_by_keys_alone(tab: chromium.Tab, stack: Stack) -> None:
    sights = [sight(step, context_tokens=40, bucket_tokens=1, **buckets(40)) for step in (1, 2)]
    stack.say("the dog", sights=sights)
    tab.look(390, 800, "dark")
    tab.open(stack.url)
    tab.wait("document.querySelector('.pane')")
    tab.run("take('fox.txt', 'the quick brown fox jumps')")
    tab.wait("document.querySelector('#doc-size').textContent.endsWith('tokens')")
    ask(tab, "who?")
    tab.wait("document.querySelector('[data-ended=stop]') && panes[0].strip.picture?.step === 2")
    assert stack.script.requests[0].attention
    tab.run("document.querySelector('canvas').focus()")
    tab.press(*RIGHT)
    tab.press(*RIGHT)
    tab.wait("document.querySelector('canvas').ariaValueText?.startsWith('Token 2,')")
    said = tab.run("document.querySelector('canvas').ariaValueText")
    assert re.fullmatch(r"Token 2, attended 25 %, 100 % in GPU slots: \S.*", said), said
    tab.press(*END)
    tab.wait("document.querySelector('.where').textContent.startsWith('Token 39 ')")
    # A pixel of the first square is of a GPU slot, wholly attended.
    pixel = "[...document.querySelector('canvas').getContext('2d').getImageData(5, 5, 1, 1).data].join()"
    assert tab.run(pixel) == "255,168,74,255"
    chosen = "[...document.querySelector('.layer').options].map((one) => one.value).join()"
    assert tab.run(chosen) == ",0,1,3"
    stack.script.requests.clear()
    tab.run("document.querySelector('.layer').value = 3")
    tab.run("document.querySelector('.layer').dispatchEvent(new Event('change'))")
    tab.wait("panes[0].strip.picture.layer === 3")
    assert tab.run("document.documentElement.scrollWidth") <= 390


def buckets(size: int) -> dict[str, Any]:
    """The first token is attended by all heads, the third by one of four, all have slots."""
    attended = bytearray(2 * 4 * size)
    for head in range(4):
        attended[2 * head * size] = 1
    attended[2 * 2] = 1
    return {"attended": bytes(attended), "on_device": b""}


@pytest.mark.slow
def test_two_policies_answer_the_same_question(tab: chromium.Tab, stack: Stack) -> None:
    stack.say("the dog")
    tab.open(stack.url)
    tab.wait("document.querySelector('.pane')")
    tab.run("document.querySelector('#compare').click()")
    offered = "[...document.querySelector('.policy').options].map((one) => one.value).join()"
    assert tab.run(offered) == ",full,pqcache"
    tab.run("document.querySelector('.policy').value = 'pqcache'")
    tab.run("document.querySelector('.budget').value = '0.1'")
    ask(tab, "who?")
    tab.wait("document.querySelectorAll('[data-ended=stop]').length === 2")
    sent = {(request.policy, request.budget.share) for request in stack.script.requests}
    assert sent == {("pqcache", 0.1), ("full", 0.0)}
    assert {request.sampling.temperature for request in stack.script.requests} == {0}
    # Where the contexts are stays in sight, however long the answers.
    tab.look(1320, 770)
    tab.run("document.querySelector('.log').style.minHeight = '3000px'")
    tab.run("scrollTo(0, 9999)")
    tops = tab.run("[...document.querySelectorAll('.view')].map((view) => view.getBoundingClientRect().top)")
    assert all(0 <= top < 100 for top in tops), tops


@pytest.mark.slow
def test_a_key_is_asked_for_and_stays_in_the_tab(tab: chromium.Tab, locked_stack: Stack) -> None:
    locked_stack.script = Script()
    tab.open(locked_stack.url)
    tab.wait("document.querySelector('#key:not(.hidden)')")
    for key in ("wrong-key", "right-key"):
        tab.run(
            "document.querySelector('#key-value').value = ''; document.querySelector('#key-value').focus()"
        )
        tab.type(key)
        tab.press(*ENTER)
        shown = (
            "document.querySelector('#key-error').textContent"
            if "wrong" in key
            else "document.querySelector('.pane')"
        )
        tab.wait(shown)
    assert json.loads(tab.run("JSON.stringify({...sessionStorage})")) == {"carrel-key": "right-key"}
    assert tab.run("localStorage.length") == 0
    assert tab.run("document.cookie") == ""
    tab.complaints.clear()  # the browser's own line for each 401
