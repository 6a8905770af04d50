"""A container's health check: `healthcheck.py unix:PATH` asks grpc.health.v1, `healthcheck.py http://...` wants a 200.

Exit code 0: healthy; 1: not, with the reason on stdout, where `docker inspect` shows it.
"""

from __future__ import annotations

import sys
import urllib.request

TIMEOUT_S = 4.0


def grpc_status(target: str) -> str:
    """What the server at a gRPC target says of itself, such as SERVING."""
    # imported late: the HTTP check needs none of it and runs every few seconds
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def http_status(url: str) -> int:
    """Status code of a GET. Raises HTTPError for 400 and above."""
    # no proxy is on the way to a server in the same container
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT_S) as answer:
        return int(answer.status)


def main(target: str) -> int:
    try:
        if target.startswith("http://"):
            found, wanted = str(http_status(target)), "200"
        else:
            found, wanted = grpc_status(target), "SERVING"
    except Exception as exc:
        # whatever went wrong is the answer
        print(f"{target}: {exc}")
        return 1
    print(f"{target}: {found}")
    return 0 if found == wanted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
