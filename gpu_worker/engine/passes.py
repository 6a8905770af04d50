"""The prompts in progress, as the engine sees them: which are computed together, and what is left to do."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.records.plans import Pass


class Passes:
    """Passes by number, and by the requests that they compute."""

    def __init__(self) -> None:
        self._by_number: dict[int, Pass] = {}
        self._by_request: dict[str, Pass] = {}

    def note(self, passes: Iterable[Pass]) -> None:
        """Take in the new state of some; one without requests is over."""
        for each in passes:
            if (before := self._by_number.pop(each.number, None)) is not None:
                for name in before.shares:
                    del self._by_request[name]
            if each.shares:
                self._by_number[each.number] = each
                self._by_request.update(dict.fromkeys(each.shares, each))

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def of(self, request_id: str) -> Pass | None:
        """Return the pass that computes a request's prompt."""
        return self._by_request.get(request_id)

    @property
    def computed(self) -> list[str]:
        """The requests of which nothing is left to compute: they wait for their tokens, and for rows to come to the
        arena."""
        return [name for name, each in self._by_request.items() if each.is_computed]

    @property
    def copying(self) -> list[Pass]:
        """The passes of which only rows have to come to the arena."""
        return [each for each in self._by_number.values() if each.is_copying]
