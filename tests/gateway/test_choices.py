"""Which choices of a request run: a prompt is computed once, and no request has the whole worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import Admission
from gateway.answer_text import StopMatcher
from gateway.choice import Choice
from gateway.choices import Choices
from gateway.errors import GenerationFailed, Overloaded, RequestTimeout, TooManyRequests
from gateway.exchange import ChoiceFinished, Event, Prefilling, TextDelta
from gateway.heavy_work import HeavyWork
from gateway.metrics import Metrics
from gateway.progress import PrefillProgress
from gateway.tokenizer import Tokenizer, load_tokenizer
from gpu_worker.v1 import gpu_worker_pb2 as pb

KEY, OTHER = b"key", b"other"


class Panic(BaseException):
    """As a library in Rust raises."""


class Worker:
    """Answers with one token and the end; each only when a test says so, by the choice's number."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.started: list[int] = []
        self.computed: set[int] = set()
        self.ended: set[int] = set()
        self.refused: set[int] = set()
        self.failed: set[int] = set()
        self.panicked: set[int] = set()

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        number = int(request.request_id)
        self.started.append(number)
        self.running.append(number)
        try:
            if number in self.refused:
                raise Overloaded("no seat", retry_after_s=0)
            yield pb.GenerateResponse(progress=pb.Progress(computed_tokens=1))
            while number not in self.computed:
                await asyncio.sleep(0)
            if number in self.panicked:
                raise Panic
            if number in self.failed:
                raise GenerationFailed()
            yield pb.GenerateResponse(token=pb.Token(token_id=20))
            while number not in self.ended:
                await asyncio.sleep(0)
            yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_LENGTH))
        finally:
            self.running.remove(number)


class Client:
    """Reads a request's events beside the test."""

    def __init__(self, worker: Worker, choices: Choices) -> None:
        self.worker = worker
        self.events: list[Event] = []
        self._stream = choices.events()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            self.events.append(event)

    async def settled(self) -> list[int]:
        """The choices at the worker once nothing moves any more."""
        for _ in range(100):
            await asyncio.sleep(0)
        return sorted(self.worker.running)

    async def end(self) -> None:
        """Wait for the last event. Raises the request's error."""
        await self._task

    async def leave(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._stream.aclose()


Make = Callable[..., list[Choice]]


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def make(model_dir: Path, worker: Worker) -> Make:
    tokenizer: Tokenizer = load_tokenizer(model_dir, None)

    def make_choices(*numbers: int, deadline: float | None = None) -> list[Choice]:
        metrics, progress = Metrics("tiny"), PrefillProgress([1] * 8, 1)
        end = time.monotonic() + 1000 if deadline is None else deadline
        return [
            Choice(
                number,
                pb.GenerateRequest(request_id=str(number), prompt_token_ids=[10]),
                end,
                StopMatcher(()),
                "",
                tokenizer,
                worker,  # type: ignore[arg-type]
                metrics,
                progress,
                HeavyWork().of(b""),
            )
            for number in numbers
        ]

    return make_choices


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_the_others_begin_when_the_first_has_a_token(worker: Worker, make: Make) -> None:
    async def main() -> None:
        with Admission(10).place(KEY) as place:
            client = Client(worker, Choices([make(0, 1, 2)], 8, place))
            assert await client.settled() == [0]
            assert [type(event) for event in client.events] == [Prefilling]
            worker.computed.add(0)
            assert await client.settled() == [0, 1, 2]
            worker.computed |= {1, 2}
            worker.ended |= {0, 1, 2}
            await client.end()
        answers = [event for event in client.events if isinstance(event, TextDelta | ChoiceFinished)]
        for index in range(3):
            mine = [type(event) for event in answers if event.index == index]
            assert mine == [TextDelta, ChoiceFinished]

    run(main())


def test_a_prompts_others_go_before_the_next_prompt_and_no_more_run_than_may(
    worker: Worker, make: Make
) -> None:
    async def main() -> None:
        with Admission(10).place(KEY) as place:
            client = Client(worker, Choices([make(0, 1, 2), make(3, 4), make(5)], 2, place))
            assert await client.settled() == [0, 3]
            worker.computed.add(0)
            assert await client.settled() == [0, 3]
            worker.ended.add(0)
            assert await client.settled() == [1, 3]
            for number in (1, 2, 3, 4, 5):
                assert len(await client.settled()) <= 2
                worker.computed.add(number)
                worker.ended.add(number)
            await client.end()
        # number 4 waits: its prompt is not computed when there is room
        assert worker.started == [0, 3, 1, 2, 5, 4]
        assert len([event for event in client.events if isinstance(event, ChoiceFinished)]) == 6

    run(main())


def test_choices_take_places_and_leave_others_theirs(worker: Worker, make: Make) -> None:
    async def main() -> None:
        admission = Admission(4, lambda caller: 3)
        with admission.place(KEY) as place:
            client = Client(worker, Choices([make(number) for number in range(6)], 6, place))
            assert await client.settled() == [0, 1, 2]
            with pytest.raises(TooManyRequests, match="3 requests"), admission.place(KEY):
                pass
            with admission.place(OTHER):
                with pytest.raises(Overloaded, match="4 requests"), admission.place(OTHER):
                    pass
                worker.computed |= set(range(6))
                worker.ended |= {0, 1, 2, 3, 4}
                assert await client.settled() == [5]
                # The last one runs in the request's own place.
                with admission.place(KEY), admission.place(KEY):
                    pass
            worker.ended.add(5)
            await client.end()
        with admission.place(KEY), admission.place(KEY), admission.place(KEY):
            pass

    run(main())


def test_a_request_alone_in_its_place_runs_its_choices_one_after_the_other(
    worker: Worker, make: Make
) -> None:
    async def main() -> None:
        worker.computed |= {0, 1, 2}
        with Admission(1).place(KEY) as place:
            client = Client(worker, Choices([make(0, 1, 2)], 8, place))
            for number in range(3):
                assert await client.settled() == [number]
                worker.ended.add(number)
            await client.end()

    run(main())


def test_who_leaves_ends_all_of_them_and_frees_their_places(worker: Worker, make: Make) -> None:
    async def main() -> None:
        admission = Admission(3)
        worker.computed.add(0)
        with admission.place(KEY) as place:
            client = Client(worker, Choices([make(0, 1, 2, 3)], 3, place))
            assert await client.settled() == [0, 1, 2]
            await client.leave()
            assert worker.running == []
        assert worker.started == [0, 1, 2]
        with admission.place(KEY), admission.place(KEY), admission.place(KEY):
            pass

    run(main())


def test_an_error_of_one_ends_all(worker: Worker, make: Make) -> None:
    async def main() -> None:
        worker.computed |= {0, 1}
        worker.failed.add(1)
        with Admission(10).place(KEY) as place:
            client = Client(worker, Choices([make(0, 1, 2)], 8, place))
            with pytest.raises(GenerationFailed):
                await client.end()
        assert worker.running == []

    run(main())


def test_an_answer_that_has_begun_waits_for_room_for_the_rest_of_it(worker: Worker, make: Make) -> None:
    async def main() -> None:
        worker.computed |= {0, 1}
        worker.ended |= {0, 1}
        worker.refused.add(1)
        with Admission(10).place(KEY) as place:
            client = Client(worker, Choices([make(0, 1)], 8, place))
            await client.settled()
            assert worker.started.count(1) > 1
            worker.refused.clear()
            await client.end()
            assert len([event for event in client.events if isinstance(event, ChoiceFinished)]) == 2
            worker.refused.add(2)
            with pytest.raises(Overloaded):
                await Client(worker, Choices([make(2, 3)], 8, place)).end()

    run(main())


def test_a_panic_of_one_choice_ends_the_request(worker: Worker, make: Make) -> None:
    async def main() -> None:
        worker.computed |= {0, 1}
        worker.ended.add(0)
        worker.panicked.add(1)
        with Admission(10).place(KEY) as place, pytest.raises(Panic):
            await Client(worker, Choices([make(0, 1)], 8, place)).end()
        assert not worker.running

    run(main())


def test_a_choice_that_begins_late_has_what_is_left_of_the_time(worker: Worker, make: Make) -> None:
    async def main() -> None:
        worker.computed.add(0)
        with Admission(10).place(KEY) as place:
            late = make(1, deadline=time.monotonic() - 1)
            client = Client(worker, Choices([[*make(0), *late]], 8, place))
            with pytest.raises(RequestTimeout):
                await client.end()
        assert worker.started == [0]

    run(main())
