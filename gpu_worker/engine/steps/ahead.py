"""Which sequences a decode step may begin for before the host has the tokens of the step that the device is at.

Between two steps the device would wait for the host: until it has the tokens, has looked whether an answer ends with
one, and has queued the next step. A step's tokens are where the next one reads them, on the device; so the next one is
queued behind it, of those whose answers go on as far as the host knows. One that turns out to have ended takes part in
vain: nothing of that step is told.
"""

from __future__ import annotations

from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.engine.steps.decoding import Decoding
from gpu_worker.state.sequence import Sequence, Status


def followers(decoding: Decoding, scheduler: Scheduler, has_arena: bool) -> list[Sequence]:
    """The sequences of the step after `decoding`; none where it has to wait, for a prompt or for the host's part in it.
    has_arena: whether the device writes to the store's arena itself."""
    # Also where something is left to do for one that took no part.
    if decoding.drawn is None or len(decoding.drawn.sequences) < len(decoding.sequences):
        return []
    running = [one for one in decoding.sequences if one.status is Status.DECODE]
    if scheduler.num_waiting or scheduler.num_running != len(running):
        return []
    if not all(_needs_no_host(one, has_arena) for one in running):
        return []
    return [one for one in running if one.num_output + 1 < one.max_tokens]


def _needs_no_host(sequence: Sequence, has_arena: bool) -> bool:
    """Whether a step and its token follow from what the host knows before the token of the step before."""
    request, sampler = sequence.request, sequence.sampler
    return (
        sampler.is_free
        and not sequence.forced
        and not (request.measure or request.attention)
        and not sequence.can_miss
        and (has_arena or not sequence.offloads)
    )
