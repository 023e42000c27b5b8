"""The bytes that a process sends over TCP, as Linux counts them, for tests."""

import os
import socket
import struct

import pytest

needs_counters = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs the counters of Linux")


def bytes_sent():
    """What this process has sent over all connections: `tcpi_bytes_sent` less `tcpi_bytes_retrans` of tcp_info."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not os.path.lexists(f"/proc/self/fd/{name}") or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                sent, again = struct.unpack_from("QQ", own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
                total += sent - again
    return total
