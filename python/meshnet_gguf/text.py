"""Text out of token bytes: characters that are split over tokens never show as broken text.

stream = Utf8Stream()
for piece in pieces:
    print(stream.push(piece), end="")
print(stream.finish())
"""

from __future__ import annotations

import codecs

__all__ = ["Utf8Stream"]


class Utf8Stream:
    """Turns byte pieces into text, holding back a character until its last byte has come.

    Bytes that can never become a character turn into U+FFFD, exactly as in
    `b"".join(pieces).decode("utf-8", "replace")`, which the returned strings add up to.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The text that `piece` completes; empty while a character is still open."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """U+FFFD for a character that was never completed, else an empty string. Starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
