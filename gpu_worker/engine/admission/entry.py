"""The way in of prompts that wait: several short ones at once, and errors of those that cannot come in."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.engine.admission.admission import Admission
from gpu_worker.engine.admission.patience import Patience
from gpu_worker.engine.admission.store_care import StoreCare
from gpu_worker.errors import (
    CapacityError,
    NeverFits,
    PrefixLoading,
    RequestError,
    StoreSilent,
    StoreUnavailable,
    WorkerError,
)
from gpu_worker.state.sequence import Sequence, Status


class Entry:
    """Admits a prompt and those that are computed with it, or ends them with an error."""

    def __init__(
        self,
        admission: Admission,
        patience: Patience,
        store_care: StoreCare,
        fail: Callable[[Sequence, WorkerError], None],
        end_full: Callable[[Sequence, CapacityError], None],
    ) -> None:
        """fail, end_full: end one with an error; the latter one that alone fills the arena."""
        self._admission = admission
        self._patience = patience
        self._store_care = store_care
        self._fail = fail
        self._end_full = end_full

    def admit(self, sequence: Sequence) -> list[Sequence] | None:
        """A waiting prompt, and short ones with it: those that were admitted, maybe none. None where it must wait, and
        others not before it."""
        if not self._admit(sequence):
            return [] if self._patience.looks_later(sequence) else None
        together, held = [sequence], self._patience.held
        while (other := self._admission.next_beside(together, held)) is not None and self._admit(other):
            together.append(other)
        # Who was admitted may have ended since, or given way to a later one.
        return [each for each in dict.fromkeys(together) if each.status is Status.PREFILL]

    def _admit(self, sequence: Sequence) -> bool:
        """False where it must wait."""
        try:
            is_admitted = self._admission.admit(sequence)
        except PrefixLoading:
            self._patience.look_later(sequence)
            return False
        except StoreSilent:
            self._patience.wait(sequence)
            return False
        except NeverFits as error:
            self._end_full(sequence, error)
            return True
        except (CapacityError, RequestError, StoreUnavailable) as error:
            self._fail(sequence, error)
            return True
        finally:
            self._store_care.end_lost()
        self._patience.end(sequence)
        return is_admitted
