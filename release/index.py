"""The index of a release, signed with the releaser's key.

    tools/bazel run //:meshnet -- keys make release.key    # once: release.key, release.key.pub
    tools/bazel run //release:publish -- --out DIR --key release.key
    tools/bazel run //release:publish -- --out DIR                 # unsigned, and the index says so

DIR then holds the artifacts, index.json with their sizes and hashes, and, signed, index.json.sig:
the Ed25519 signature of "meshnet release v1\\n" and the index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

from meshnet.errors import ControlError
from meshnet.signing import SigningKey

__all__ = ["index", "main", "publish"]

PURPOSE = "release"


def index(version: str, artifacts: Sequence[pathlib.Path], key_id: str | None) -> bytes:
    """The index of `artifacts`, as it is signed."""
    entries = [
        {
            "name": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in sorted(artifacts, key=lambda path: path.name)
    ]
    document = {"version": version, "signed_by": key_id or "unsigned", "artifacts": entries}
    return (json.dumps(document, indent=2) + "\n").encode()


def publish(
    version: str, artifacts: Sequence[pathlib.Path], out: pathlib.Path, key: SigningKey | None
) -> None:
    """Copies the artifacts to `out` and writes the index beside them."""
    out.mkdir(parents=True, exist_ok=True)
    for path in artifacts:
        shutil.copyfile(path, out / path.name)
    content = index(version, artifacts, key.key_id if key else None)
    (out / "index.json").write_bytes(content)
    signature = out / "index.json.sig"
    signature.unlink(missing_ok=True)
    if key:
        signature.write_bytes(key.sign(PURPOSE, content))


def main(arguments: Sequence[str]) -> int:
    """Publishes; 1 when the key cannot be used."""
    parser = argparse.ArgumentParser(
        prog="publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "--artifacts", type=pathlib.Path, nargs="+", required=True, help=argparse.SUPPRESS
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--key", type=pathlib.Path, help="private Ed25519 key in PEM")
    parser.add_argument("--index_only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # `bazel run` starts programs in its own folder.
    here = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    if options.index_only:
        options.out.write_bytes(index(options.version, options.artifacts, None))
        return 0
    out = here / options.out
    try:
        key = SigningKey.load(here / options.key) if options.key else None
    except ControlError as error:
        sys.stderr.write(f"publish: {error}\n")
        return 1
    publish(options.version, options.artifacts, out, key)
    state = f"signed by {key.key_id}" if key else "UNSIGNED (give --key to sign it)"
    sys.stdout.write(f"{out}: {len(options.artifacts)} artifacts, index {state}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
