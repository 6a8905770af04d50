"""Test that a background job continues after a failure, and that the log says so once."""

from __future__ import annotations

import logging

import pytest

from carrel.process.noted_errors import NotedErrors


def test_each_kind_is_told_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    errors = NotedErrors(logging.getLogger("test"), "what is tried")
    for error in (ValueError("first"), ValueError("second"), KeyError("other")):
        with errors.noting():
            raise error
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "what is tried failed, and goes on" in caplog.text
    assert "first" in caplog.text
    assert "second" not in caplog.text
    with pytest.raises(KeyboardInterrupt), errors.noting():
        raise KeyboardInterrupt
