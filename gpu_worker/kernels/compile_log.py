"""A line in the log for every kernel that Triton compiles, so that what stalls a server says its name."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def log_compiled() -> None:
    """From now on, at DEBUG; where that is not logged nothing changes."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    import triton

    triton.knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    done = "read" if cache_hit else "compiled"
    logger.debug("%s %s in %.0f ms", done, metadata.get("name"), 1e-3 * times.total)
