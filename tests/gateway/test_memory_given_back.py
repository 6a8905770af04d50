"""Memory that a flood took is given back when the server is idle."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from waiting import PATIENCE, eventually

from gateway import memory
from gateway.service import ChatService

# pieces that are freed but for one in a hundred: whatever is free lies between those that are not
SCATTERED = """
from gateway.memory import give_back, map_large_pieces, resident_bytes
map_large_pieces()
before = resident_bytes()
pieces = [bytes(4000) for _ in range(50_000)]
kept = pieces[::100]
pieces.clear()
left = resident_bytes() - before
give_back()
print(left, resident_bytes() - before)
"""

# a large piece is freed once, by which glibc would keep those of its size
LARGE = """
from gateway.memory import map_large_pieces, resident_bytes
map_large_pieces()
before = resident_bytes()
for _ in range(3):
    pieces = [bytearray(4 * 2**20) for _ in range(20)]
    kept = [piece[:5000] for piece in pieces]
    pieces.clear()
print(resident_bytes() - before)
"""


def run(script: str) -> list[int]:
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return [int(each) for each in told.stdout.split()]


def test_free_memory_between_what_is_not_is_given_back() -> None:
    left, after = run(SCATTERED)
    assert left > 100 * 2**20
    assert after < left // 2


def test_large_pieces_are_given_back_at_once() -> None:
    assert run(LARGE)[0] < 20 * 2**20


def test_memory_is_given_back_when_the_server_is_idle_and_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LOOKED_EVERY_S", 0.001)
    resident, given, looked = 100 * 2**20, [], []

    def look() -> int:
        looked.append(resident)
        return resident

    def give_back() -> None:
        nonlocal resident
        given.append(resident)
        resident = 100 * 2**20

    monkeypatch.setattr(memory, "resident_bytes", look)
    monkeypatch.setattr(memory, "give_back", give_back)
    service = SimpleNamespace(
        admission=SimpleNamespace(num_running=0), bodies=SimpleNamespace(room=SimpleNamespace(num_bytes=0))
    )

    async def main(service: ChatService) -> None:
        nonlocal resident
        task = asyncio.create_task(memory.keep_giving_back(service))
        for running, receiving, grown in ((0, 0, 10), (1, 0, 500), (0, 9, 500), (0, 0, 500), (0, 0, 10)):
            service.admission.num_running, service.bodies.room.num_bytes = running, receiving
            resident, seen = (100 + grown) * 2**20, len(looked)
            await eventually(lambda seen=seen: len(looked) > seen + 5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main(service))
    assert given == [600 * 2**20]
