"""Asks the C++ implementation of the protocol, a small program beside the tests."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Iterable
from types import TracebackType

from meshnet_gguf.protocol import FrameExpectation

from tests.golden import golden_pb2
from tests.golden.conversion import expectation_to

__all__ = ["Oracle", "ask_once"]

_PROGRAM = pathlib.Path(__file__).parents[2] / "cc" / "protocol" / "protocol_oracle"
_PREFIX_BYTES = 4


def ask_once(mode: str) -> bytes:
    """What the program writes in a mode that reads nothing."""
    return subprocess.run([_PROGRAM, mode], check=True, stdout=subprocess.PIPE).stdout


class Oracle:
    """The program in its mode for frames; a context manager."""

    def __enter__(self) -> Oracle:
        """Starts the program."""
        self._process = subprocess.Popen(
            [_PROGRAM, "frames"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the program, which must not have failed."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            code = self._process.wait(timeout=30)
        assert code == 0 or kind is not None, f"the oracle ended with {code}"

    def take(
        self, expectation: FrameExpectation, frames: Iterable[bytes], *, finish: bool = False
    ) -> list[golden_pb2.Outcome]:
        """Feeds the frames to a new receiver; the outcome of each, and of the end if asked for."""
        question = golden_pb2.Question(
            expectation=expectation_to(expectation), frames=frames, finish=finish
        ).SerializeToString()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(len(question).to_bytes(_PREFIX_BYTES, "little") + question)
        stdin.flush()
        size = int.from_bytes(stdout.read(_PREFIX_BYTES), "little")
        return list(golden_pb2.Answer.FromString(stdout.read(size)).outcomes)
