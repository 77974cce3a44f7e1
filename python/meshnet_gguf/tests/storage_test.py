import pathlib

import pytest
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.storage import storage_root

from proto.meshnet.shard.v1 import errors_pb2


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
