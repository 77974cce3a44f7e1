"""What must not be in the worker: llama.cpp's RPC backend, which trusts whoever calls it."""

import os
import pathlib

WORKER = (
    pathlib.Path(os.environ["TEST_SRCDIR"])
    / os.environ["TEST_WORKSPACE"]
    / os.environ["WORKER_BINARY"]
)


def test_has_no_rpc_backend() -> None:
    content = WORKER.read_bytes()
    # The names of the backend that is there can be read, so those of another one could be, too.
    assert b"ggml_backend_cpu" in content
    assert b"ggml_backend_rpc" not in content
