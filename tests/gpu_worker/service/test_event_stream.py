import asyncio
import threading

from waiting import PATIENCE

from gpu_worker.errors import SlowConsumer
from gpu_worker.records import (
    AttentionEvent,
    CompleteEvent,
    ErrorEvent,
    FinishReason,
    ProgressEvent,
    TokenEvent,
    Usage,
)
from gpu_worker.service.event_stream import EventStream

# All but the step.
SEEN = (9, 1, (0,), 2, b"", b"", 0, 0, "dense", 0, 1.0, 0, "full", 9, 9.0)
COMPLETE = CompleteEvent(FinishReason.LENGTH, Usage())


async def collect(stream):
    return [event async for event in stream]


async def test_events_of_another_thread_arrive_in_order_and_end_the_stream():
    stream = EventStream(asyncio.get_running_loop(), on_overflow=lambda: None)
    events = [*(TokenEvent(i) for i in range(1000)), COMPLETE]
    thread = threading.Thread(target=lambda: [stream.put(event) for event in events])
    thread.start()
    assert await asyncio.wait_for(collect(stream), PATIENCE) == events
    thread.join(PATIENCE)


async def test_only_progress_that_was_not_read_is_replaced():
    stream = EventStream(asyncio.get_running_loop(), on_overflow=lambda: None)
    for event in (
        ProgressEvent(1),
        ProgressEvent(2),
        TokenEvent(1),
        ProgressEvent(3),
        TokenEvent(1),
        COMPLETE,
    ):
        stream.put(event)
    expected = [ProgressEvent(2), TokenEvent(1), ProgressEvent(3), TokenEvent(1), COMPLETE]
    assert await asyncio.wait_for(collect(stream), PATIENCE) == expected


async def test_of_what_was_attended_one_event_waits_at_a_time():
    stream = EventStream(asyncio.get_running_loop(), on_overflow=lambda: None)
    first, second, third = (AttentionEvent(n, *SEEN) for n in range(3))
    for event in (TokenEvent(1), first, second):
        stream.put(event)
    reading = aiter(stream)
    assert [await anext(reading), await anext(reading)] == [TokenEvent(1), first]
    for event in (third, COMPLETE):
        stream.put(event)
    assert [event async for event in reading] == [third, COMPLETE]


async def test_an_overflow_leaves_one_error_and_is_told_once():
    overflows = []
    stream = EventStream(asyncio.get_running_loop(), lambda: overflows.append(1), max_pending=4)
    for i in range(20):
        stream.put(TokenEvent(i))
    (event,) = await asyncio.wait_for(collect(stream), PATIENCE)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, SlowConsumer)
    assert overflows == [1]


async def test_a_full_stream_that_is_read_in_time_does_not_overflow():
    stream = EventStream(asyncio.get_running_loop(), on_overflow=lambda: None, max_pending=4)
    for i in range(3):
        stream.put(TokenEvent(i))
    stream.put(COMPLETE)
    assert len(await asyncio.wait_for(collect(stream), PATIENCE)) == 4


def test_events_after_the_loop_has_ended_are_dropped():
    loop = asyncio.new_event_loop()
    stream = EventStream(loop, on_overflow=lambda: None)
    loop.close()
    stream.put(TokenEvent(1))
    stream.put(COMPLETE)
