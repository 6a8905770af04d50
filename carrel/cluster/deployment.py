"""Deploying to a running Ray cluster, and taking away."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import ray.exceptions
from ray import serve
from ray.serve.schema import ApplicationStatus

from carrel.cluster.app import build
from carrel.cluster.options import Place
from carrel.errors import DeployError

NAMESPACE = "carrel"
POLL_S = 0.5
PROXY_STARTS = 3
FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


def deploy(address: str | None, place: Place, arguments: Mapping[str, Any], timeout_s: float) -> None:
    """Return when the application serves; it goes on when we end. Raises DeployError.

    An application of this name is updated: new replicas come as old ones finish what they run.
    """
    with _connected(address):
        _start_proxies(place)
        target = serve.RunTarget(build(dict(arguments)), name=place.name, route_prefix="/")
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
        _await_running(place, timeout_s)
    print(f"ready  http://{place.host}:{place.port}")


def _start_proxies(place: Place) -> None:
    """Once more where a proxy was slow to start: Serve kills it and starts another."""
    for attempt in range(PROXY_STARTS):
        try:
            serve.start(proxy_location=place.proxies, http_options={"host": place.host, "port": place.port})
            return
        except ray.exceptions.ActorDiedError as exc:
            if attempt == PROXY_STARTS - 1:
                raise DeployError(f"Ray Serve's proxies do not start: {exc}") from exc


def remove(address: str | None, place: Place, timeout_s: float) -> None:
    """Return when the application is gone; it goes on ending when we end. Raises DeployError."""
    with _connected(address):
        if place.name not in serve.status().applications:
            raise DeployError(f"there is no application {place.name!r} on this cluster")
        deadline = time.monotonic() + timeout_s
        # Serve itself waits for a minute: too short where a node has just died.
        with contextlib.suppress(TimeoutError):
            serve.delete(place.name)
        while place.name in serve.status().applications:
            if time.monotonic() > deadline:
                raise DeployError(
                    f"application {place.name!r} is not gone after {timeout_s:g} s; it goes on ending"
                )
            time.sleep(POLL_S)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise DeployError(
            f"no Ray cluster at {address or 'this node'}: {reason}; start one with `ray start --head`, and give the "
            "token that it was started with (RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
        ) from exc
    try:
        yield
    finally:
        ray.shutdown()


def _await_running(place: Place, timeout_s: float) -> None:
    deadline, told = time.monotonic() + timeout_s, ""
    while True:
        application = serve.status().applications.get(place.name)
        if application is not None and application.status == ApplicationStatus.RUNNING:
            return
        if application is not None and (news := _news(application)) != told:
            told = news
            print(told, file=sys.stderr, flush=True)
        if application is not None and application.status in FAILED:
            raise DeployError(f"application {place.name!r}: {application.status.value}")
        if time.monotonic() > deadline:
            raise DeployError(
                f"application {place.name!r} does not serve after {timeout_s:g} s; it goes on trying"
            )
        time.sleep(POLL_S)


def _news(application: Any) -> str:
    lines = [
        application.message,
        *(f"{name}: {each.message}" for name, each in application.deployments.items()),
    ]
    return "\n".join(line for line in lines if line and not line.endswith(": "))
