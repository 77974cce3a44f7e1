"""Says exactly what an artifact is: makes its manifest, whose hash is its identity.

    meshnet manifest model.gguf --repository example/model-gguf --revision 60d8d70 > manifest.json
    meshnet manifest /srv/models/v4 --out v4.manifest.json
    meshnet manifest --show manifest.json

Takes one GGUF file, the parts of a split set, or a folder that holds one artifact, and reads every
byte once. --show prints what a manifest says instead. `sha256sum` of the manifest is the identity.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from meshnet_gguf.cli import output
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import (
    DEFAULT_CHUNK_BYTES,
    Manifest,
    Origin,
    make_manifest,
    read_manifest,
)
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["run"]

_REPOSITORY = flags.DEFINE_string("repository", "", "Where the artifact is published.")
_REVISION = flags.DEFINE_string("revision", "", "Its exact revision there.")
_TOKENIZER_REVISION = flags.DEFINE_string(
    "tokenizer_revision", "", "Revision of the tokenizer that the artifact was made with."
)
_CHUNK_BYTES = flags.DEFINE_integer(
    "chunk_bytes", DEFAULT_CHUNK_BYTES, "Bytes of a chunk, a power of two."
)
_OUT = flags.DEFINE_string("out", None, "Write the manifest to this file instead of stdout.")
_SHOW = flags.DEFINE_bool("show", False, "Print what a manifest says.")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    paths = [output.given_path(name) for name in arguments]
    if _SHOW.value:
        if len(paths) != 1:
            raise app.UsageError(f"expected one manifest to show, got {len(paths)}")
        manifest = read_manifest(paths[0])
        _show(manifest)
        return 0
    if not paths:
        raise app.UsageError("expected GGUF files or a folder of them, got none")
    if output.wants_json() and not _OUT.value:
        raise app.UsageError("expected --out FILE with --json: stdout would hold two objects")
    origin = Origin(_REPOSITORY.value, _REVISION.value, _TOKENIZER_REVISION.value)
    manifest = make_manifest(paths, origin, chunk_bytes=_CHUNK_BYTES.value)
    if not _OUT.value:
        sys.stdout.write(manifest.to_bytes().decode("ascii"))
        sys.stdout.flush()
        return 0
    path = output.given_path(_OUT.value)
    _write(path, manifest.to_bytes())
    if output.wants_json():
        output.print_json({"artifact_sha256": manifest.artifact_sha256, "manifest": str(path)})
    else:
        sys.stdout.write(f"{manifest.artifact_sha256}  {path}\n")
    return 0


def _write(path: pathlib.Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise MeshnetError(
            errors_pb2.REASON_CONFIGURATION_INVALID, f"cannot write {path} ({error.strerror})"
        ) from error


def _show(manifest: Manifest) -> None:
    if output.wants_json():
        output.print_json(
            {
                "artifact_sha256": manifest.artifact_sha256,
                "repository": manifest.origin.repository,
                "revision": manifest.origin.revision,
                "tokenizer_revision": manifest.origin.tokenizer_revision,
                "tokenizer_sha256": manifest.tokenizer_sha256,
                "chunk_bytes": manifest.chunk_bytes,
                "bytes": manifest.total_bytes,
                "files": [
                    {
                        "name": file.name,
                        "bytes": file.bytes,
                        "role": str(file.role),
                        "layers": list(file.layers or ()),
                        "sha256": file.sha256,
                    }
                    for file in manifest.files
                ],
            }
        )
        return
    origin = manifest.origin
    lines = [
        f"artifact   {manifest.artifact_sha256}",
        f"source     {origin.repository or '-'} {origin.revision or '-'}",
        f"tokenizer  {manifest.tokenizer_sha256} {origin.tokenizer_revision or '-'}",
        f"size       {manifest.total_bytes:,} bytes in chunks of {manifest.chunk_bytes:,}",
    ]
    for file in manifest.files:
        layers = f"layers [{file.layers[0]}, {file.layers[1]})" if file.layers else "no layers"
        lines.append(f"{file.sha256}  {file.name}  {file.role}, {layers}, {file.bytes:,} bytes")
    sys.stdout.write("\n".join(lines) + "\n")
