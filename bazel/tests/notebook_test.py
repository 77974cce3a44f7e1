"""The Python stubs talk to the C++ server that the same .proto files made."""

import contextlib
import pathlib
import subprocess
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from bazel.tests import note_pb2, notebook_pb2, notebook_pb2_grpc


@pytest.fixture
def address() -> Iterator[str]:
    program = pathlib.Path(__file__).parent / "notebook_server"
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield f"127.0.0.1:{int(server.stdout.readline())}"
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()
        assert server.wait(timeout=60) == 0


async def test_stream_to_the_other_language(address: str) -> None:
    async def notes() -> AsyncIterator[note_pb2.Note]:
        for text in ("first", "second"):
            note = note_pb2.Note(text=text)
            note.written.FromSeconds(7)
            yield note

    async with grpc.aio.insecure_channel(address) as channel:
        summary = await notebook_pb2_grpc.NotebookStub(channel).Take(notes())
    assert summary == notebook_pb2.Summary(notes=2, last_text="second")
