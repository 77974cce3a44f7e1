"""The one error of this package, and the stable reasons it can have."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Reason(enum.Enum):
    """Why something was refused. The value is the exit code of the command line."""

    MANIFEST_INVALID = 10  # the manifest or the patch order does not say exactly what is pinned
    TREE_MISMATCH = 11  # files do not hash to the pinned git tree
    ARCHIVE_MISMATCH = 12  # a downloaded file has another size or hash than the pinned one
    ARCHIVE_UNSAFE = (
        13  # an archive would write outside its folder, or things other than plain files
    )
    SOURCE_UNAVAILABLE = 14  # no retrieval method gave the source
    PATCH_INVALID = 15  # a patch file that cannot be read, or has no complete header
    PATCH_CONFLICT = 16  # a hunk does not match the file
    PATCH_FORBIDDEN = 17  # a patch changes what it must not
    WORK_TREE_INVALID = 18  # a work tree that does not hold the pinned tree and commits on top


class LlamaSourceError(Exception):
    """A refusal: what was expected, what was found, what to do."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        expected: str = "",
        found: str = "",
        details: Sequence[str] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.expected = expected
        self.found = found
        self.details = tuple(details)
        self.hint = hint

    def __str__(self) -> str:
        """All of it, for people, on several lines."""
        lines = [f"{self.reason.name}: {self.message}"]
        if self.expected or self.found:
            lines += [f"  expected: {self.expected}", f"  found:    {self.found}"]
        lines += [f"  - {detail}" for detail in self.details]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)
