"""Events that wait until the device has its next work; on a CPU, which is the device, none does."""

from __future__ import annotations

import pytest
from request_rig import make_request

from gpu_worker.engine.outbox import Outbox
from gpu_worker.records import Event, TokenEvent


@pytest.mark.parametrize("holds", [False, True])
def test_events_are_emitted_in_their_order(holds: bool) -> None:
    emitted: list[tuple[str, Event]] = []
    requests = {
        name: make_request(name, sink=lambda event, name=name: emitted.append((name, event))) for name in "ab"
    }
    outbox = Outbox(holds)
    events = [("a", TokenEvent(1)), ("b", TokenEvent(2)), ("a", TokenEvent(3))]
    for name, event in events:
        outbox.put(requests[name], event)
    assert len(emitted) == (0 if holds else 3)
    outbox.emit()
    outbox.emit()
    assert emitted == events
