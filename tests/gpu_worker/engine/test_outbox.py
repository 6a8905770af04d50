"""Events that wait until the device has its next work; on a CPU, which is the device, none does."""

from __future__ import annotations

import pytest
import torch
from offload_rig import make_sequence

from gpu_worker.engine.outbox import Outbox
from gpu_worker.records import Event, TokenEvent


@pytest.mark.parametrize(("device", "held"), [("cpu", 0), ("cuda", 3)])
def test_events_are_told_in_their_order(device: str, held: int) -> None:
    told: list[tuple[str, Event]] = []
    sequences = [make_sequence(name, seat, 4) for seat, name in enumerate("ab")]
    for sequence in sequences:
        name = sequence.sequence_id
        sequence.sink = lambda event, name=name: told.append((name, event))
    outbox = Outbox(torch.device(device))
    events = [("a", TokenEvent(1)), ("b", TokenEvent(2)), ("a", TokenEvent(3))]
    for name, event in events:
        outbox.put(sequences["ab".index(name)], event)
    assert len(told) == len(events) - held
    outbox.tell()
    outbox.tell()
    assert told == events
