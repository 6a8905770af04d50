"""How large the slot pool of this worker's last start was: one that is started again has no smaller one unnoticed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from gpu_worker.errors import ConfigError

logger = logging.getLogger(__name__)

# Device memory of a process that was killed is back after moments.
PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.5
# Below this share of the earlier pool this one is smaller.
_SAME_SHARE = 0.98


class EarlierPool:
    """A file next to the worker's socket with the slot pool's size. Workers with other options ignore it."""

    def __init__(
        self,
        path: Path | None,
        options: str,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """path: None: nothing is remembered. options: of the worker, as a text that is only compared."""
        self._path = path
        self._options = hashlib.sha256(options.encode()).hexdigest()
        self._sleep = sleep
        self._clock = clock

    def settle(self, plan: Callable[[], int]) -> int:
        """Bytes for slots. plan: gives what there is now; where that is less than before it is asked again for some
        seconds, and a warning tells if it stays so. Where it is more, the pool is as large as before."""
        before, until = self._read(), self._clock() + PATIENCE_SECONDS
        while before and self._clock() < until and not self._is_enough(before, plan):
            self._sleep(_POLL_SECONDS)
        now = plan()
        if before and now < _SAME_SHARE * before:
            logger.warning(
                "the slot pool has %d bytes, that of the worker before this one had %d: others hold the memory; end "
                "them and start this worker again, or give --slot-memory",
                now,
                before,
            )
        settled = min(before, now) if before else now
        self._write(max(before, settled))
        return settled

    def _is_enough(self, before: int, plan: Callable[[], int]) -> bool:
        try:
            return plan() >= _SAME_SHARE * before
        except ConfigError:
            # There was memory before.
            return False

    def _read(self) -> int:
        """0 where there was no start with these options."""
        if self._path is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path.read_text())
            if found["options"] == self._options:
                return int(found["slot_bytes"])
        return 0

    def _write(self, slot_bytes: int) -> None:
        if self._path is not None:
            # A folder that cannot be written to costs the comparison only.
            with contextlib.suppress(OSError):
                self._path.write_text(json.dumps({"options": self._options, "slot_bytes": slot_bytes}))
