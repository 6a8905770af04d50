"""How the stores of a cluster's replicas reach each other, to move prefixes."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
import ray.util

from carrel.cluster.options import ClusterOptions
from carrel.serve.options import ServeOptions

# well within the time that a gateway waits for reports
CHECK_S = 1.0


@dataclass(frozen=True)
class Peering:
    """token: what the stores of one deployment ask of each other, a secret; "" where they do not meet."""

    token: str = field(default="", repr=False)

    @property
    def is_on(self) -> bool:
        return bool(self.token)

    def address(self, port: int = 0) -> str:
        """HOST:PORT on this node's own address; "" where stores do not meet. port 0: the store takes a free one."""
        return host_port(ray.util.get_node_ip_address(), port) if self.is_on else ""

    async def address_of(self, store: Any, timeout_s: float = CHECK_S) -> str:
        """Where a store's actor on this node listens for other stores; "" while it does not answer."""
        try:
            port = await asyncio.wait_for(store.peer_port.remote(), timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return ""
        return self.address(port)


def host_port(node: str, port: int) -> str:
    """As gRPC reads it: an IPv6 address in brackets."""
    return f"[{node}]:{port}" if ":" in node else f"{node}:{port}"


def make_peering(options: ServeOptions, cluster: ClusterOptions) -> Peering:
    """A new token where prefixes are to move, and there is somewhere to move them."""
    if not cluster.moves or options.prefix_cache == "off":
        return Peering()
    return Peering(secrets.token_urlsafe(32))
