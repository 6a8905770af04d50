"""The application's builder: what `import_path` of a Serve configuration names."""

from __future__ import annotations

from typing import Any, cast

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from carrel.cluster.gateway import Gateway
from carrel.cluster.options import ClusterOptions, read_arguments
from carrel.cluster.replica import Replica

ROUTER = "carrel.cluster.router.WishRouter"
HEAD = "node:__internal_head__"
# of the head's one: gateways find room, and nothing else that asks for a share of it is kept away
HEAD_SHARE = 0.001
# beside what admission lets in: refusals, /health, /metrics
MORE_GATEWAY_REQUESTS = 64
# beside requests: reports, aborts
MORE_REPLICA_CALLS = 32
STOP_MARGIN_S = 30.0
DRAIN_CHECK_S = 0.5
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
START_TRIES = 3


def build(args: dict[str, Any]) -> Application:
    """The application for `args`, as `read_arguments` reads them. Raises OptionError."""
    options = read_arguments(args).options
    replica = deployment(Replica, replica_options(options))
    gateway = deployment(Gateway, gateway_options(options))
    return gateway.bind(replica.bind(args), args)


def deployment(kind: type, options: dict[str, Any]) -> Deployment:
    # Any: a decorator's type says nothing of what it is given
    bare: Any = serve.deployment(kind)
    return cast(Deployment, bare.options(**options))


def replica_options(options: ClusterOptions) -> dict[str, Any]:
    """Resources, scaling, limits and drain time of the replicas."""
    actor: dict[str, Any] = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    worker = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
    store = {"CPU": options.store_cpus} | ({"memory": options.arena_bytes} if options.arena_bytes else {})
    # Any: pydantic reads a class from its path, which its type does not say
    router: Any = ROUTER
    chosen = {
        "name": "Replica",
        "ray_actor_options": actor,
        # on one node: the store hands its memory to the worker as a file descriptor
        "placement_group_bundles": [worker, store],
        "placement_group_strategy": "STRICT_PACK",
        # the gateway keeps to max_requests: Serve would let reports wait behind streams
        "max_ongoing_requests": options.max_requests + MORE_REPLICA_CALLS,
        "max_queued_requests": MORE_REPLICA_CALLS,
        "request_router_config": RequestRouterConfig(request_router_class=router),
        "max_constructor_retry_count": START_TRIES,
        **_life(options),
    }
    if options.min_replicas == options.most_replicas:
        return chosen | {"num_replicas": options.min_replicas}
    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.most_replicas,
        target_ongoing_requests=options.target_requests,
    )
    return chosen | {"autoscaling_config": scaling}


def gateway_options(options: ClusterOptions) -> dict[str, Any]:
    """One gateway on the head node: it knows what every replica was given, and a lost node takes no other's streams."""
    return {
        "name": "Gateway",
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0, "resources": {HEAD: HEAD_SHARE}},
        "max_ongoing_requests": options.max_concurrent + MORE_GATEWAY_REQUESTS,
        "max_constructor_retry_count": START_TRIES,
        **_life(options),
    }


def _life(options: ClusterOptions) -> dict[str, Any]:
    return {
        "graceful_shutdown_wait_loop_s": DRAIN_CHECK_S,
        "graceful_shutdown_timeout_s": options.shutdown_timeout_s + STOP_MARGIN_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }
