"""Actions and tests see no network but their own loopback interface."""

import pathlib
import socket

import pytest


def test_only_loopback() -> None:
    if pathlib.Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        pytest.skip("this kernel makes no user namespaces, so there is no sandbox")
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=10).close()
