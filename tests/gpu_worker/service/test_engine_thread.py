import threading

import pytest
from fake_engine import FakeEngine
from waiting import PATIENCE, wait_until

from gpu_worker.errors import CapacityError, EngineStopped, RequestError
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from gpu_worker.service.engine_thread import EngineThread


def request(request_id="r", max_tokens=3):
    return GenerationRequest(
        request_id, (4, 5), SamplingParams(max_tokens=max_tokens), "full", Budget(share=1.0)
    )


class Sink:
    """Keeps the events of one request; `ended` is set by the last."""

    def __init__(self):
        self.events = []
        self.threads = set()
        self.ended = threading.Event()

    def __call__(self, event):
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        if isinstance(event, CompleteEvent | ErrorEvent):
            self.ended.set()

    def last(self):
        assert self.ended.wait(PATIENCE)
        return self.events[-1]


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def died():
    return threading.Event()


@pytest.fixture
def port(engine, died):
    thread = EngineThread(engine, max_queue=1, on_death=died.set)
    yield thread
    engine.gate.set()
    thread.close()


def test_events_come_in_order_from_the_engines_thread(port):
    sink = Sink()
    port.submit(request(), sink)
    assert sink.last().finish_reason is FinishReason.LENGTH
    assert [event.token_id for event in sink.events if isinstance(event, TokenEvent)] == [4, 5, 4]
    assert sink.threads == {"engine"}


def test_an_error_of_submit_ends_only_that_request(engine, port):
    engine.failure = CapacityError("no slots")
    sink = Sink()
    port.submit(request(), sink)
    assert sink.last().error is engine.failure
    engine.failure = None
    again = Sink()
    port.submit(request(), again)
    assert isinstance(again.last(), CompleteEvent)


def test_seats_and_queue_bound_the_live_requests(engine, port):
    engine.gate.clear()
    sinks = [Sink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        port.submit(request(f"r{i}"), sink)
    with pytest.raises(CapacityError, match="2 seats and 1 queue"):
        port.submit(request("r3"), Sink())
    with pytest.raises(RequestError):
        port.submit(request("r0"), Sink())
    engine.gate.set()
    assert all(isinstance(sink.last(), CompleteEvent) for sink in sinks)


def test_what_the_engine_has_not_taken_yet_waits_with_its_tokens(engine, port):
    held, go = threading.Event(), threading.Event()

    def hold(event):
        held.set()
        assert go.wait(PATIENCE)

    port.submit(request("first"), hold)
    assert held.wait(PATIENCE)
    later = Sink()
    port.submit(request("later"), later)
    assert (port.stats().waiting, port.stats().waiting_tokens) == (1, 2)
    go.set()
    later.last()
    assert (port.stats().waiting, port.stats().waiting_tokens) == (0, 0)


def test_an_abort_right_after_a_submit_is_not_lost(engine, port):
    engine.endless = True
    sink = Sink()
    port.submit(request(), sink)
    port.abort("r")
    assert sink.last().finish_reason is FinishReason.ABORT


def test_an_idle_engine_takes_no_steps(engine, port):
    sink = Sink()
    port.submit(request(), sink)
    sink.last()
    assert engine.num_steps == 3


def test_drain_waits_for_the_running_and_refuses_the_new(engine, port):
    engine.gate.clear()
    sink = Sink()
    port.submit(request(), sink)
    assert not port.drain(0.01)
    with pytest.raises(EngineStopped):
        port.submit(request("new"), Sink())
    engine.gate.set()
    assert port.drain(PATIENCE)
    assert isinstance(sink.last(), CompleteEvent)


def test_close_aborts_the_running_and_closes_the_engine(engine, port):
    engine.endless = True
    sink = Sink()
    port.submit(request(), sink)
    port.close()
    port.close()
    assert sink.ended.is_set()
    assert engine.was_closed
    with pytest.raises(EngineStopped):
        port.submit(request("new"), Sink())


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize("error", [ZeroDivisionError("inner text"), Panic("inner text")])
def test_an_unexpected_error_fails_every_request_and_is_told_once(engine, port, died, error):
    engine.gate.clear()
    sinks = [Sink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        port.submit(request(f"r{i}"), sink)
    engine.error = error
    engine.gate.set()
    for sink in sinks:
        error = sink.last().error
        assert isinstance(error, EngineStopped)
        assert "inner text" not in str(error)
    assert died.wait(PATIENCE)
    assert port.is_dead
    with pytest.raises(EngineStopped, match="internal error"):
        port.submit(request("new"), Sink())
    assert port.drain(PATIENCE)


def test_stats_are_a_copy(engine, port):
    before = port.stats()
    before.running = 99
    assert port.stats().running == 0


def test_an_engine_is_tended_also_while_nobody_asks_for_anything(engine, port):
    wait_until(lambda: engine.num_tended >= 2)
    assert engine.num_steps == 0


def test_a_call_that_its_caller_gave_up_is_not_made_and_harms_nobody(port):
    goes_on, made = threading.Event(), []
    port.call(lambda: goes_on.wait(PATIENCE))
    given_up = port.call(lambda: made.append("given up"))
    assert given_up.cancel()
    goes_on.set()
    port.call(lambda: made.append("next")).result(PATIENCE)
    assert made == ["next"]
    assert not port.is_dead


def test_a_call_runs_between_steps_and_its_error_is_the_callers(engine, port):
    names = []
    port.call(lambda: names.append(threading.current_thread().name)).result(PATIENCE)
    assert names == ["engine"]
    with pytest.raises(ZeroDivisionError):
        port.call(lambda: 1 // 0).result(PATIENCE)
    sink = Sink()
    port.submit(request(), sink)
    assert isinstance(sink.last(), CompleteEvent)


def is_refusing(port):
    try:
        port.submit(request("probe"), Sink())
    except EngineStopped:
        return True
    except RequestError:
        # The one before it is there still.
        return False
    return False


@pytest.mark.parametrize("error", [None, ZeroDivisionError("inner"), Panic("inner")])
def test_no_call_waits_for_an_engine_that_has_ended(engine, died, error):
    checks, goes_on = threading.Event(), threading.Event()

    def check_store():
        checks.set()
        assert goes_on.wait(PATIENCE)
        if error is not None:
            raise error

    engine.check_store = check_store
    port = EngineThread(engine, max_queue=1, on_death=died.set)
    assert checks.wait(PATIENCE)
    # The engine is at its turn, so this waits for the next one, which does not come.
    before = port.call(lambda: None)
    if error is None:
        threading.Thread(target=port.close).start()
        wait_until(lambda: is_refusing(port))
    goes_on.set()
    for call in (before, port.call(lambda: None)):
        with pytest.raises(EngineStopped):
            call.result(PATIENCE)
    port.close()


def test_a_panic_of_a_call_is_the_callers(port):
    def panic():
        raise Panic("inner")

    with pytest.raises(Panic):
        port.call(panic).result(PATIENCE)
    assert not port.is_dead


def test_whether_the_store_is_there_is_told_while_a_step_takes_long(engine, port):
    begun, go_on = threading.Event(), threading.Event()

    def step():
        begun.set()
        assert go_on.wait(PATIENCE)
        return FakeEngine.step(engine)

    engine.step = step
    port.submit(request(), sink := Sink())
    assert begun.wait(PATIENCE)
    assert port.stats().store_reachable
    engine.has_store = False
    assert not port.stats().store_reachable
    go_on.set()
    sink.last()


def test_progress_is_told_at_every_turn_and_event_but_not_while_the_engine_hangs(engine):
    told, go_on = [], threading.Event()
    thread = EngineThread(engine, 1, lambda: None, lambda: told.append(threading.current_thread().name))
    # idle
    wait_until(lambda: len(told) >= 2)
    thread.submit(request(max_tokens=40), sink := Sink())
    sink.last()
    # a turn and an event for each token
    assert len(told) > 80
    assert set(told) == {"engine"}
    hung = threading.Event()

    def hang():
        hung.set()
        go_on.wait(PATIENCE)
        return True

    engine.step = hang
    engine.endless = True
    thread.submit(request("hangs"), Sink())
    assert hung.wait(PATIENCE)
    before = len(told)
    with pytest.raises(RequestError):
        thread.submit(request("hangs"), Sink())
    assert len(told) == before
    go_on.set()
    thread.close()
