"""Masks that take long, of a matcher that gives one only when a test lets it."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from waiting import wait_until

from gpu_worker.errors import RequestError
from gpu_worker.grammar.constraint import SLOW_SECONDS, GrammarConstraint


@dataclass
class Vocabulary:
    vocab_size: int = 70
    eos_tokens: tuple[int, ...] = (0, 69)


@dataclass
class Matcher:
    """Allows one token, and the end once it has been taken. The first mask takes long, later ones until `gate` is
    open."""

    token_id: int
    gate: threading.Event = field(default_factory=threading.Event)
    taken: list[int] = field(default_factory=list)
    computing: threading.Event = field(default_factory=threading.Event)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        if self.taken:
            self.computing.set()
            self.gate.wait()
            self.computing.clear()
        else:
            time.sleep(10 * SLOW_SECONDS)
        words = (ctypes.c_uint32 * (num_bytes // 4)).from_address(address)
        words[self.token_id // 32] |= 1 << self.token_id % 32

    def consume_token(self, token_id: int) -> bool:
        if self.computing.is_set():
            raise RuntimeError("Already borrowed")
        self.taken.append(token_id)
        return token_id == self.token_id

    def is_accepting(self) -> bool:
        return bool(self.taken)

    def is_stopped(self) -> bool:
        return len(self.taken) == 2

    def get_error(self) -> str:
        return "why\nnot"


def test_a_mask_that_takes_long_is_computed_beside_the_steps() -> None:
    with ThreadPoolExecutor(1) as executor:
        constraint = GrammarConstraint(matcher := Matcher(40), Vocabulary(), "the_field", executor)
        assert constraint.is_ready
        constraint.take(40)
        assert not constraint.is_ready
        assert not constraint.is_complete
        matcher.gate.set()
        wait_until(lambda: constraint.is_ready)
        constraint.take(40)
        assert constraint.is_complete


def test_a_token_that_comes_before_the_mask_is_there_waits_for_it() -> None:
    with ThreadPoolExecutor(2) as executor:
        constraint = GrammarConstraint(matcher := Matcher(40), Vocabulary(), "the_field", executor)
        constraint.take(40)
        assert matcher.computing.wait(10)
        taken = executor.submit(constraint.take, 40)
        matcher.gate.set()
        taken.result(10)
    assert matcher.taken == [40, 40]


def test_the_mask_is_of_the_models_vocabulary_with_its_end_tokens_where_the_answer_may_end() -> None:
    with ThreadPoolExecutor(1) as executor:
        constraint = GrammarConstraint(matcher := Matcher(40), Vocabulary(), "the_field", executor)
        matcher.gate.set()
        assert constraint.allowed(100, {5, 69}).tolist() == [0, 1 << 8, 0, 0]
        # where nothing may follow anything does, and is refused when it is taken
        assert constraint.allowed(64, {40}).tolist() == [-1, -1]
        constraint.take(40)
        assert constraint.allowed(100, {5, 69}).tolist() == [1 << 5, 1 << 8, 1 << 5, 0]
        with pytest.raises(RequestError, match="cannot go on by the_field: why not") as error:
            constraint.take(41)
    assert error.value.param == "the_field"
