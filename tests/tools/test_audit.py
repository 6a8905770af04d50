"""An audit fails on what is known and open, and says so where it compared nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ports import free_port

from tools.audit import Verdict, judge, main, out_of_reach


def report(*dependencies: dict[str, object]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


CLEAN = {"name": "one", "version": "1.0", "vulns": []}
BAD = {
    "name": "two",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"]}],
}
UNKNOWN = {"name": "three", "skip_reason": "Dependency not found on PyPI"}


def test_what_is_known_and_open_fails() -> None:
    found = judge(report(CLEAN, BAD, UNKNOWN), "")
    assert found.exit_code == 1
    assert "two 2.0: PYSEC-1, mended in 2.1; OPEN" in found.text
    assert "not compared: three" in found.text
    assert judge(report(CLEAN), "").exit_code == 0


def test_an_exception_has_a_reason() -> None:
    found = judge(report(BAD), "", {"CVE-1": "we never call it"})
    assert found.exit_code == 0
    assert "PYSEC-1, mended in 2.1; we never call it" in found.text


def test_what_could_not_be_compared_is_no_success_in_words() -> None:
    assert judge(report(UNKNOWN), "") == Verdict(
        "skipped: there are advisories of none of 1 packages within reach", 0
    )
    assert judge("", "requests.exceptions.ConnectionError: no route").text.startswith(
        "skipped: the advisories"
    )
    assert judge("", "Traceback\nValueError: x") == Verdict("pip-audit failed: ValueError: x", 2)


@contextmanager
def index(body: str | None, status: str = "200 OK") -> Iterator[str]:
    """The address of one that answers so once; None: never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                if body is not None:
                    peer.sendall(f"HTTP/1.0 {status}\r\n\r\n{body}".encode())
                else:
                    peer.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join()


def test_an_index_with_advisories_is_within_reach() -> None:
    with index(json.dumps({"id": "PYSEC-1"})) as url:
        assert out_of_reach(url, timeout_s=60) is None


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("", "404 Not Found", "404"),
        ('{"message": "Bug not found."}', "200 OK", "no advisories"),
        ("{}", "200 OK", "no advisories"),
        ("no JSON", "200 OK", "Expecting value"),
    ],
)
def test_an_index_without_them_is_not(body: str, status: str, reason: str) -> None:
    with index(body, status) as url:
        assert reason in str(out_of_reach(url, timeout_s=60))


def test_who_is_silent_or_away_holds_up_nobody() -> None:
    with index(None) as url:
        assert out_of_reach(url, timeout_s=0.1)
    assert "refused" in str(out_of_reach(f"http://127.0.0.1:{free_port()}/", timeout_s=60))


def test_it_is_skipped_where_advisories_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.audit.out_of_reach", lambda: "no route")
    assert main(["nowhere"]) == 0
    assert capsys.readouterr().out == "audit skipped: the advisories are out of reach (no route)\n"
