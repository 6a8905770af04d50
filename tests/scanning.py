"""Answers of a host's ports to another host."""

from __future__ import annotations

import socket

from waiting import PATIENCE


def open_ports(address: str) -> list[int]:
    """Every TCP port at an address that takes a connection from here."""

    def is_open(port: int) -> bool:
        with socket.socket() as link:
            link.settimeout(PATIENCE)
            return link.connect_ex((address, port)) == 0

    return [port for port in range(1, 1 << 16) if is_open(port)]
