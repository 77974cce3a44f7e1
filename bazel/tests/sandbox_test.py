"""Actions and tests see no network but their own loopback interface."""

import pathlib
import socket

LIMIT = pathlib.Path("/proc/sys/user/max_user_namespaces")


def test_this_kernel_makes_sandboxes() -> None:
    # Without them Bazel runs everything outside any sandbox and says nothing.
    assert int(LIMIT.read_text("ascii")) > 0, (
        f"expected user namespaces for Bazel's sandbox, {LIMIT} forbids them; "
        "run: sysctl user.max_user_namespaces=10000"
    )


def test_only_loopback() -> None:
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=10).close()
