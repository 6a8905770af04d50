"""Checks of a deployment while one of its processes is killed, and while it is stopped under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tools.compose.actors import check_actors
from tools.compose.asking import ANSWER, ANSWER_S, RunningStream, ask, question
from tools.compose.deployment import GATEWAY, SERVICES, STORE, WORKER, CheckFailed, Deployment, wait_until

# an error comes at once; a hang would be minutes
ERROR_S = 30.0
BACK_S = 300.0
# stop_grace_period for each of the three
STOP_S = 180.0
WATCH_S = 0.05
NUM_STREAMS = 8
# what the gateway says then
DRAINING = f"draining {NUM_STREAMS} requests"
# of a stream that must still run when SIGTERM comes, and must end in the shutdown timeout
DRAINED_TOKENS = 200
NOBODY = 0


@dataclass(frozen=True)
class Fault:
    """Outcome of a kill: seconds since the kill, and statuses of /ready, one for each change."""

    name: str
    statuses: tuple[int, ...]
    stream_ended_s: float
    stream_error: str
    ready_s: float


@dataclass(frozen=True)
class Drain:
    """Outcome of the streams that ran when SIGTERM came."""

    name: str
    num_streams: int
    stop_s: float


def kill_worker(deployment: Deployment) -> Fault:
    """The stream ends with an error, the store keeps its epoch. Raises CheckFailed."""
    epoch = deployment.epoch()
    fault = _killed(deployment, WORKER, {httpx.codes.SERVICE_UNAVAILABLE}, lambda: deployment.kill(WORKER))
    if deployment.epoch() != epoch:
        raise CheckFailed("the store has another epoch, although only the worker died")
    return fault


def kill_store(deployment: Deployment) -> Fault:
    """The stream, which recalls, ends with an error; the new store has another epoch. Raises CheckFailed."""
    return _killed_store(deployment, STORE, lambda: deployment.kill(STORE))


def kill_store_actor(deployment: Deployment) -> Fault:
    """The same when only the Ray actor dies: its container is started again. Raises CheckFailed."""
    return _killed_store(deployment, f"{STORE}, its actor", deployment.kill_store_actor)


def kill_gateway(deployment: Deployment) -> Fault:
    """The connection breaks, worker and store go on. Raises CheckFailed."""
    not_ready = {NOBODY, httpx.codes.SERVICE_UNAVAILABLE}
    return _killed(deployment, GATEWAY, not_ready, lambda: deployment.kill(GATEWAY))


def stop_gateway(deployment: Deployment) -> Drain:
    """SIGTERM for the gateway alone, under eight streams; it serves again when started. Raises CheckFailed."""
    with _watched(deployment) as statuses:
        drain = _drained(deployment, "gateway", GATEWAY)
        deployment.compose("up", "--detach", "--no-build")
        wait_until("the gateway is ready again", deployment.is_ready, BACK_S)
    if httpx.codes.SERVICE_UNAVAILABLE not in statuses:
        raise CheckFailed(f"/ready was {statuses} while the gateway drained")
    ask(deployment)
    return drain


def stop_all(deployment: Deployment) -> Drain:
    """Send SIGTERM to each process under eight streams, as `down` does first. Raises CheckFailed."""
    return _drained(deployment, "all three")


def _killed_store(deployment: Deployment, name: str, kill: Callable[[], None]) -> Fault:
    """As `_killed`; Ray runs the new store and its trainers too."""
    epoch = deployment.epoch()
    fault = _killed(deployment, STORE, {httpx.codes.SERVICE_UNAVAILABLE}, kill, name)
    if deployment.epoch() == epoch:
        raise CheckFailed(f"the new store has the epoch {epoch} of the dead one")
    check_actors(deployment)
    return fault


def _killed(
    deployment: Deployment, service: str, not_ready: set[int], kill: Callable[[], None], name: str = ""
) -> Fault:
    """Kill a process of the service under a stream that recalls, and see all be well again."""
    started = _starts(deployment)
    with _watched(deployment) as statuses:
        stream = RunningStream(deployment, question(max_tokens=4000, ignore_eos=True))
        stream.wait_for_deltas(len(ANSWER) + 1)
        killed = time.monotonic()
        kill()
        stream.wait_for_end(ERROR_S)
        ended = time.monotonic()
        wait_until(f"{service} is started again", lambda: _starts(deployment) != started, BACK_S)
        wait_until("the gateway is ready again", deployment.is_ready, BACK_S)
        ready = time.monotonic()
        # /ready has to stay as it is meanwhile
        ask(deployment)
    if not stream.error or not stream.text.startswith(ANSWER):
        raise CheckFailed(
            f"{service} killed: a stream ended with {stream.error!r} after {stream.text[:40]!r}"
        )
    seen = set(statuses[1:-1])
    if not seen or not seen <= not_ready or {statuses[0], statuses[-1]} != {httpx.codes.OK}:
        raise CheckFailed(f"{service} killed: /ready was {statuses}")
    changed = {name for name, since in _starts(deployment).items() if since != started[name]}
    if changed != {service}:
        raise CheckFailed(f"{service} killed: started again were {sorted(changed)}")
    wait_until("all are healthy", deployment.is_healthy, BACK_S)
    fault = Fault(
        name or service, tuple(statuses), round(ended - killed, 1), stream.error, round(ready - killed, 1)
    )
    print(f"compose-test: {fault}", flush=True)
    return fault


def _starts(deployment: Deployment) -> dict[str, str]:
    """When each container was started last."""
    return {name: deployment.inspect(name, "State.StartedAt") for name in SERVICES}


@contextmanager
def _watched(deployment: Deployment) -> Iterator[list[int]]:
    """The statuses of /ready, one for each change; complete when the block has ended."""
    statuses: list[int] = [deployment.readiness()]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            if (status := deployment.readiness()) != statuses[-1]:
                statuses.append(status)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield statuses
    finally:
        over.set()
        thread.join()


def _drained(deployment: Deployment, name: str, *services: str) -> Drain:
    """Stop services (none: all) under eight streams, all of which must end as undisturbed ones do."""
    body = question(
        messages=[{"role": "user", "content": "Once upon a time"}],
        max_tokens=DRAINED_TOKENS,
        ignore_eos=True,
    )
    undisturbed = RunningStream(deployment, body)
    undisturbed.wait_for_end(ANSWER_S)
    streams = [RunningStream(deployment, body) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.wait_for_deltas(1)
    said, stopping = deployment.logs(GATEWAY).count(DRAINING), time.monotonic()
    deployment.compose("stop", *services)
    took = time.monotonic() - stopping
    for stream in streams:
        stream.wait_for_end(STOP_S)
        if stream.error or stream.finish_reason != "length":
            raise CheckFailed(
                f"a stream ended with {stream.error or stream.finish_reason!r} instead of draining"
            )
        if stream.text != undisturbed.text:
            raise CheckFailed(
                f"a drained stream said {stream.text!r}, an undisturbed one {undisturbed.text!r}"
            )
    for service in services or SERVICES:
        if (code := deployment.inspect(service, "State.ExitCode")) != "0":
            raise CheckFailed(f"{service} stopped with {code}")
    if deployment.logs(GATEWAY).count(DRAINING) != said + 1:
        raise CheckFailed(f"the {NUM_STREAMS} streams had ended before SIGTERM came: make them longer")
    drain = Drain(name, NUM_STREAMS, round(took, 1))
    print(f"compose-test: {drain}", flush=True)
    return drain
