"""Test when a silent worker is waited for, and when it counts as hung."""

from __future__ import annotations

import asyncio

import pytest

from gateway import worker_client
from gateway.errors import RequestTimeout, WorkerUnavailable
from gateway.worker_client import LOOKS, Pulse


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "LOOK_S", 0.001)


async def test_who_answers_when_asked_is_waited_for_and_asked_once_a_look_however_many_wait() -> None:
    answers = [asyncio.get_running_loop().create_future() for _ in range(20)]
    num_asked = 0

    async def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 5 * LOOKS:
            for answer in answers:
                answer.set_result("taken")

    worker = Pulse(ask)
    assert await asyncio.gather(*map(worker.wait, answers)) == ["taken"] * 20
    assert num_asked == 5 * LOOKS


async def test_what_it_says_to_others_is_a_sign_of_life_too() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    worker = Pulse(asyncio.Event().wait)

    async def talk() -> None:
        for _ in range(5 * LOOKS):
            worker.beat()
            await asyncio.sleep(0.001)
        answer.set_result("taken")

    talking = asyncio.create_task(talk())
    assert await worker.wait(answer) == "taken"
    await talking


@pytest.mark.parametrize("error", [None, WorkerUnavailable()], ids=["silent", "fails"])
async def test_who_says_nothing_hangs_and_is_not_waited_for(error: Exception | None) -> None:
    async def ask() -> None:
        if error is not None:
            raise error
        await asyncio.Event().wait()

    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with pytest.raises(WorkerUnavailable, match="does not answer"):
        await Pulse(ask).wait(answer)
    assert answer.cancelled()


async def test_an_answers_own_error_is_raised() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer.set_exception(RequestTimeout(1.0))
    with pytest.raises(RequestTimeout):
        await Pulse(asyncio.Event().wait).wait(answer)
