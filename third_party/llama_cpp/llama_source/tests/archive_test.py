from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from third_party.llama_cpp.llama_source import archive, git_tree
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason
from third_party.llama_cpp.llama_source.tests.conftest import FILES, Upstream


def _tar(*members: tuple[str, bytes, str, str]) -> io.BytesIO:
    """A tar archive of (name, type, link target, content)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, target, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = target
            info.mode = 0o644
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    stream.seek(0)
    return stream


def _file(name: str, content: str = "x") -> tuple[str, bytes, str, str]:
    return (name, tarfile.REGTYPE, "", content)


def _link(name: str, target: str) -> tuple[str, bytes, str, str]:
    return (name, tarfile.SYMTYPE, target, "")


def test_a_tree_survives_packing_and_unpacking(upstream: Upstream) -> None:
    (upstream.source / "src/alias.c").symlink_to("engine.c")
    stream = io.BytesIO()
    archive.create_tar(upstream.source, stream)
    stream.seek(0)
    out = upstream.root / "out"
    archive.extract_tar(stream, out)
    assert git_tree.scan(out) == git_tree.scan(upstream.source)


def test_the_same_tree_makes_the_same_archive(upstream: Upstream) -> None:
    streams = [io.BytesIO(), io.BytesIO()]
    for stream in streams:
        archive.create_tar(upstream.source, stream)
    # the header of gzip has the time at bytes 4 to 8
    first, second = (s.getvalue()[:4] + s.getvalue()[8:] for s in streams)
    assert first == second


def test_the_prefix_is_taken_off(tmp_path: Path) -> None:
    stream = _tar(("top/", tarfile.DIRTYPE, "", ""), _file("top/a/b.c"), _file("top/c.c"))
    archive.extract_tar(stream, tmp_path / "out", "top/")
    assert sorted(git_tree.scan(tmp_path / "out")) == ["a/b.c", "c.c"]


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ([_file("/etc/evil")], "an absolute or odd one"),
        ([_file("../evil")], "../evil"),
        ([_file("a/../../evil")], "a/../../evil"),
        ([_file("a//b")], "a//b"),
        ([_link("out", "../..")], "../.."),
        ([_link("a/out", "../../x")], "../../x"),
        ([_link("out", "/etc")], "/etc"),
        ([_link("d", "a"), _file("d/evil")], "one through a file or link"),
        ([_file("a"), _file("a/b")], "one through a file or link"),
        ([_file("a"), _file("a")], "a second one"),
        ([_file("a"), _link("a", "b")], "a second one"),
        ([_file("a/b"), _link("a", "b")], "a file or link"),
        ([("hard", tarfile.LNKTYPE, "a", "")], "type b'1'"),
        ([("pipe", tarfile.FIFOTYPE, "", "")], "type b'6'"),
        ([("device", tarfile.CHRTYPE, "", "")], "type b'3'"),
    ],
)
def test_a_hostile_member_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes, str, str]], found: str
) -> None:
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(_tar(_file("good"), *members), tmp_path / "box" / "out")
    assert caught.value.reason is Reason.ARCHIVE_UNSAFE
    assert caught.value.found == found
    assert [p.name for p in tmp_path.iterdir()] == ["box"]
    assert [p.name for p in (tmp_path / "box").iterdir()] == ["out"]


def test_a_member_outside_the_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(_tar(_file("other/a")), tmp_path / "out", "top")
    assert caught.value.expected == "everything below top/"


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 10)
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(_tar(_file("a", "x" * 6), _file("b", "x" * 6)), tmp_path / "out")
    assert caught.value.expected == "at most 10 bytes"
    monkeypatch.setattr(archive, "MAX_MEMBERS", 2)
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(_tar(_file("a"), _file("b"), _file("c")), tmp_path / "out2")
    assert caught.value.expected == "at most 2 members"


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(io.BytesIO(data), tmp_path / "out")
    assert caught.value.reason is Reason.ARCHIVE_UNSAFE


def test_a_truncated_archive_is_refused(upstream: Upstream) -> None:
    stream = io.BytesIO()
    archive.create_tar(upstream.source, stream)
    half = io.BytesIO(stream.getvalue()[: len(stream.getvalue()) // 2])
    with pytest.raises(LlamaSourceError) as caught:
        archive.extract_tar(half, upstream.root / "out")
    assert caught.value.reason is Reason.ARCHIVE_UNSAFE
    assert len(FILES) > 1
