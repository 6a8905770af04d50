"""The order of prompts: short before long, but not for ever; one caller's prompts do not hold up another's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from request_rig import make_request

from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.engine.request import Request, Status
from gpu_worker.engine.scheduler import Scheduler

MAX_LEN = 1 << 14
STRETCH = 4.0


def make(max_num_seqs: int = 8, chunk: int = MAX_LEN) -> Scheduler:
    """A prompt's seconds are the tokens that it may make."""
    room = PromptRoom(MAX_LEN, chunk)
    return Scheduler(max_num_seqs, room, lambda one: one.asked.sampling.max_tokens, STRETCH)


def start(scheduler: Scheduler, request: Request) -> None:
    scheduler.seat(request)
    scheduler.admit(request)


def prompt(
    name: str,
    seconds: int,
    arrival: float = 0.0,
    caller: bytes = b"",
    tokens: int = 100,
    weight: float = 1.0,
    priority: int = 0,
) -> Request:
    """Return a request with a prompt that takes so long alone."""
    return make_request(
        name, tokens, seconds, arrival=arrival, caller=caller, weight=weight, priority=priority
    )


@dataclass
class Device:
    """Gives each second to whose prompt is next."""

    scheduler: Scheduler
    left: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def add(
        self, name: str, seconds: int, caller: bytes = b"", tokens: int = 100, weight: float = 1.0
    ) -> None:
        self.left[name] = seconds
        self.scheduler.add(prompt(name, seconds, self.now, caller, tokens, weight))

    def run(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1
            request = self.scheduler.next_prompt(may_admit=True)
            if request is None:
                continue
            if request.status is Status.WAITING:
                start(self.scheduler, request)
            name = request.request_id
            self.scheduler.serve(request, 1.0)
            self.left[name] -= 1
            if not self.left[name]:
                self.ended[name] = self.now
                self.scheduler.remove(request)


def test_a_short_prompt_overtakes_a_long_one_that_is_in_progress() -> None:
    device = Device(make())
    device.add("long", 100)
    device.run(10)
    device.add("short", 2)
    device.run(2)
    assert device.ended == {"short": 12}
    device.run(90)
    assert device.ended["long"] == 102


def test_a_long_prompt_ends_whatever_arrives() -> None:
    """Short ones arrive as fast as they are computed; the long one waits for its stretch and no longer."""
    device = Device(make(max_num_seqs=1000))
    device.add("long", 50)
    for second in range(400):
        device.add(f"short {second}", 1)
        device.run()
    assert STRETCH * 50 < device.ended["long"] <= STRETCH * 50 + 50
    quick = [end - int(name.split()[1]) for name, end in device.ended.items() if name.startswith("short")]
    assert sorted(quick)[len(quick) // 4] <= STRETCH + 1


def test_equal_prompts_are_computed_in_their_order_and_one_after_the_other() -> None:
    device = Device(make())
    for name in ("a", "b", "c"):
        device.add(name, 5)
        device.run()
    device.run(20)
    assert device.ended == {"a": 5, "b": 10, "c": 15}


def test_three_prompts_of_one_caller_leave_another_half_of_the_device() -> None:
    device = Device(make())
    for number in range(3):
        device.add(f"many {number}", 100, b"many")
    device.run(50)
    device.add("one", 30, b"one")
    device.run(250)
    assert device.ended["one"] <= 50 + 2 * 30
    # Nothing of it is lost to the others.
    device.run(30)
    assert device.ended["many 2"] == 330


def test_callers_share_by_their_weights() -> None:
    device = Device(make())
    device.add("light", 100, b"light")
    device.add("heavy", 90, b"heavy", weight=3.0)
    device.run(120)
    assert 118 <= device.ended["heavy"] <= 120
    device.run(70)
    assert device.ended["light"] == 190


@pytest.mark.parametrize("num_callers", [4, 1000])
def test_a_long_prompt_ends_however_many_callers_have_short_ones(num_callers: int) -> None:
    """Three of them wait at any time, as fast as they are computed; each caller has one at a time."""
    device = Device(make(max_num_seqs=1000))
    device.add("long", 50, b"long")
    device.run(10)
    num_short = 0
    while "long" not in device.ended and device.now < 1000:
        while num_short - sum(name.startswith("short") for name in device.ended) < 3:
            device.add(f"short {num_short}", 1, f"caller {num_short % num_callers}".encode())
            num_short += 1
        device.run()
    # It has a fourth of the device, once it was overtaken for its stretch.
    assert device.now <= 4 * 50 + 4 * STRETCH


def test_who_was_away_is_owed_nothing_for_that_time() -> None:
    device = Device(make())
    device.add("early", 1, b"guest")
    device.add("other", 100, b"host")
    device.run(60)
    device.add("back", 20, b"guest")
    device.run(60)
    # Half of the device from when it came back; all of it would be 20 seconds.
    assert 60 + 38 <= device.ended["back"] <= 60 + 42


def test_who_gives_way_is_owed_nothing_for_the_time_that_it_decoded() -> None:
    device = Device(make())
    decoding = prompt("decoding", 20, caller=b"guest")
    device.scheduler.add(decoding)
    start(device.scheduler, decoding)
    decoding.status = Status.DECODE
    device.add("other", 100, b"host")
    device.run(60)
    device.left["decoding"] = 20
    device.scheduler.wait_again(decoding)
    device.run(60)
    assert 60 + 38 <= device.ended["decoding"] <= 60 + 42


def test_a_short_prompt_waits_for_no_room_that_a_long_one_waits_for() -> None:
    scheduler = make(chunk=MAX_LEN // 8)
    first = prompt("first", 9, tokens=MAX_LEN)
    second = prompt("second", 9, arrival=-1000, tokens=MAX_LEN // 2)
    scheduler.add(first)
    start(scheduler, first)
    # Most urgent of all, but without room.
    scheduler.add(second)
    short = [prompt(f"short {number}", 1, tokens=MAX_LEN // 8) for number in range(2)]
    for request in short:
        scheduler.add(request)
    assert scheduler.next_prompt(may_admit=True) is short[0]
    start(scheduler, short[0])
    # For the other short one there is none either.
    assert scheduler.next_prompt(may_admit=True) is short[0]
    scheduler.remove(short[0])
    assert scheduler.next_prompt(may_admit=True) is short[1]
    scheduler.remove(first)
    assert scheduler.next_prompt(may_admit=True) is second


def test_a_short_prompt_waits_for_none_that_is_computed_unless_a_long_one_needs_the_room() -> None:
    scheduler = make(chunk=MAX_LEN // 8)
    short = [prompt(f"short {number}", 1, number, tokens=MAX_LEN // 8) for number in range(3)]
    for request in short:
        scheduler.add(request)
    start(scheduler, short[0])
    # Nothing is left to compute of the first; of the second there is.
    assert scheduler.next_prompt(may_admit=True, held=short[:1]) is short[1]
    start(scheduler, short[1])
    assert scheduler.next_prompt(may_admit=True, held=short[:1]) is short[1]
    long = prompt("long", 9, tokens=MAX_LEN)
    scheduler.add(long)
    # Which waits for the room that was lent, and nobody takes more of it.
    assert scheduler.next_prompt(may_admit=True, held=short[:2]) is None
    scheduler.remove(short[0])
    assert scheduler.next_prompt(may_admit=True, held=short[1:2]) is long
    start(scheduler, long)
    assert scheduler.next_prompt(may_admit=True, held=short[1:2]) is long


def test_a_seat_that_was_of_no_use_is_given_back() -> None:
    scheduler = make(max_num_seqs=1)
    first, second = prompt("first", 1), prompt("second", 2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.seat(first)
    assert scheduler.next_prompt(may_admit=True) is None
    scheduler.unseat(first)
    assert scheduler.next_prompt(may_admit=True) is first
    scheduler.seat(second)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.num_free_seats == 1
    assert not scheduler.has_work


def test_priority_comes_before_a_callers_share_and_any_deadline() -> None:
    scheduler = make()
    usual, late, low = (
        prompt("usual", 1),
        prompt("late", 100, 50.0, b"greedy", priority=-1),
        prompt("low", 1, priority=3),
    )
    scheduler.add(low)
    start(scheduler, low)
    scheduler.add(usual)
    assert scheduler.next_prompt(may_admit=True) is usual
    scheduler.add(late)
    scheduler.serve(late, 1000.0)
    assert scheduler.next_prompt(may_admit=True) is late
    start(scheduler, late)
    assert scheduler.next_prompt(may_admit=True) is late
    scheduler.remove(late)
    assert scheduler.next_prompt(may_admit=False) is low


def test_without_a_seat_only_who_is_more_important_than_a_running_one_is_next() -> None:
    scheduler = make(max_num_seqs=1)
    running, alike, high = prompt("running", 9), prompt("alike", 1), prompt("high", 9, 5.0, priority=-1)
    scheduler.add(running)
    start(scheduler, running)
    running.status = Status.DECODE
    scheduler.add(alike)
    assert scheduler.next_prompt(may_admit=True) is None
    scheduler.add(high)
    assert scheduler.next_prompt(may_admit=True) is high
    assert scheduler.lower(high) == [running]


def test_who_waits_again_has_its_old_place_and_gives_its_seat_back() -> None:
    scheduler = make(max_num_seqs=2)
    first, second = prompt("first", 1, 1.0), prompt("second", 1, 2.0)
    for request in (first, second):
        scheduler.add(request)
    for request in (first, second):
        start(scheduler, request)
    for request in (second, first):
        scheduler.wait_again(request)
    assert (scheduler.num_waiting, scheduler.num_free_seats) == (2, 2)
    assert scheduler.all() == [first, second]
    assert scheduler.next_prompt(may_admit=True) is first
