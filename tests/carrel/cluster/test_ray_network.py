"""The network of a test's hosts on a machine whose firewall forwards nothing, as Docker's does; by `make faults`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray_network import can_make_networks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_networks(), reason="needs the right to make network namespaces"),
    pytest.mark.skipif(not shutil.which("iptables"), reason="needs iptables"),
    pytest.mark.skipif(not Path("/proc/sys/net/bridge").exists(), reason="needs the kernel's br_netfilter"),
]

# the machine is a namespace too: nothing of this one's firewall changes
MACHINE = """
ip link set lo up
iptables -P FORWARD DROP
sysctl -q -w net.bridge.bridge-nf-call-iptables=1
exec "$0" -c "$1"
"""
TALK = """
import subprocess, sys
from ray_network import network

LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); print(flush=True); s.accept(), s.accept()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 5)"
with network(2) as net:
    one, other = net.hosts
    for address in (other.address, other.public_address):
        command = other.within(sys.executable, "-c", LISTEN, address)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            ends = [subprocess.run([*place, sys.executable, "-c", CONNECT, address]) for place in (one.within(), [])]
            server.kill()
        assert [end.returncode for end in ends] == [0, 0], address
"""


def test_hosts_and_this_machine_reach_each_other_whatever_its_firewall_forwards() -> None:
    ended = subprocess.run(
        ["unshare", "--net", "sh", "-e", "-c", MACHINE, sys.executable, TALK], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
