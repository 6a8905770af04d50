"""Errors for what ran out of device memory, each with what gives more."""

from __future__ import annotations

from gpu_worker.errors import CapacityError


def no_room(what: str, error: Exception) -> CapacityError:
    """For a prompt, a step, or one request's part of a step; PyTorch's error says how much was asked for."""
    reason = str(error).partition("\n")[0]
    return CapacityError(f"{what} does not fit beside what is there: {reason} Leave more with --slot-memory")


def no_room_for_policy(policy: str, work: str, num_tokens: int) -> CapacityError:
    """For a policy's own work on a prompt; work: a verb."""
    return CapacityError(
        f"no device memory is left for policy {policy!r} to {work} {num_tokens} tokens; leave more free with "
        "--slot-memory, or choose another policy"
    )
