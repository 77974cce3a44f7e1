"""What makes a release: lists, archives, index."""

import hashlib
import io
import json
import os
import pathlib
import tarfile
import zipfile
from typing import Any

import pytest
import yaml
from meshnet.signing import SigningKey

from release import index, notice, pack, wheel

DEPENDENCIES: list[dict[str, Any]] = yaml.safe_load(
    pathlib.Path(os.environ["DEPS_YAML"]).read_text("utf-8")
)


@pytest.mark.parametrize("product", ["worker", "wheel"])
def test_notice_and_bill_name_every_component(product: str) -> None:
    components = notice.components_of(DEPENDENCIES, product)
    names = {entry["name"] for entry in components}
    assert ("llama.cpp" in names) == (product == "worker")
    assert ("grpcio" in names) == (product == "wheel")
    assert "pytest" not in names
    assert "GoogleTest" not in names
    text = notice.notice(components, product, "1.2.3")
    bill = json.loads(notice.sbom(components, product, "1.2.3"))
    assert bill["bomFormat"] == "CycloneDX"
    assert [entry["name"] for entry in bill["components"]] == [e["name"] for e in components]
    assert bill["dependencies"][0]["dependsOn"] == [e["bom-ref"] for e in bill["components"]]
    for entry, component in zip(bill["components"], components, strict=True):
        assert f"\n{component['name']} {component['version']}\n" in text
        assert f"licence: {component['licence']}\n" in text
        assert entry["licenses"][0]
        assert entry["purl"].startswith("pkg:")
    assert len({entry["purl"] for entry in bill["components"]}) == len(components)


def test_licences_are_written_as_cyclonedx_wants_them() -> None:
    entry = {"name": "x", "version": "1", "purpose": "p", "url": "u", "source": "pypi"}
    for licence, expected in [
        ("MIT", {"license": {"id": "MIT"}}),
        ("MIT OR Apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("LicenseRef-Public-Domain", {"license": {"name": "LicenseRef-Public-Domain"}}),
    ]:
        bill = json.loads(notice.sbom([{**entry, "licence": licence}], "wheel", "1"))
        assert bill["components"][0]["licenses"] == [expected]


@pytest.mark.parametrize("field", ["licence", "use", "version", "source"])
def test_an_entry_without_a_field_is_refused(field: str) -> None:
    broken = [{**DEPENDENCIES[0], field: ""}]
    with pytest.raises(ValueError, match=field):
        notice.components_of(broken, "worker")


def test_tarballs_are_the_same_for_the_same_content() -> None:
    files = {"bin/program": b"\x7fELF", "install.sh": b"#!", "LICENSE": b"text"}
    packed = pack.pack("root-1", files)
    assert packed == pack.pack("root-1", dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert tar.getnames() == sorted(f"root-1/{name}" for name in [*files, "SHA256SUMS"])
        modes = {member.name.removeprefix("root-1/"): member.mode for member in tar}
        assert {member.mtime for member in tar} == {0}
        sums = tar.extractfile("root-1/SHA256SUMS")
        assert sums is not None
        lines = sums.read().decode().splitlines()
    assert modes == {
        "LICENSE": 0o644,
        "SHA256SUMS": 0o644,
        "bin/program": 0o755,
        "install.sh": 0o755,
    }
    assert f"{hashlib.sha256(b'text').hexdigest()}  LICENSE" in lines


def test_wheels_are_the_same_for_the_same_content() -> None:
    files = {"meshnet_gguf/a.py": b"A = 1\n", "licenses/LICENSE": b"text"}
    made = wheel.wheel("1.2.3", files, ["numpy", "rich"])
    assert made == wheel.wheel("1.2.3", dict(reversed(files.items())), ["numpy", "rich"])
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        metadata = archive.read("meshnet_gguf-1.2.3.dist-info/METADATA").decode()
        record = archive.read("meshnet_gguf-1.2.3.dist-info/RECORD").decode()
    assert "meshnet_gguf-1.2.3.dist-info/licenses/LICENSE" in names
    assert "Requires-Dist: numpy\nRequires-Dist: rich\n" in metadata
    assert {line.split(",")[0] for line in record.splitlines()} == set(names)


def test_messages_lie_in_the_package_that_they_belong_to() -> None:
    source = (
        "import os\n"
        "from proto.meshnet.shard.v1 import errors_pb2\n"
        "from proto.meshnet.shard.v1 import frame_pb2 as proto_dot_meshnet_dot_frame__pb2\n"
        "def late():\n"
        "    from proto.meshnet.control.v1 import tracker_pb2\n"
        "_b.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'proto.meshnet.shard.v1.a_pb2', _g)\n"
        "name = 'proto/meshnet/shard/v1/a.proto'\n"
    )
    moved = (
        "import os\n"
        "from meshnet_gguf._proto.shard.v1 import errors_pb2\n"
        "from meshnet_gguf._proto.shard.v1 import frame_pb2 as proto_dot_meshnet_dot_frame__pb2\n"
        "def late():\n"
        "    from meshnet._proto.control.v1 import tracker_pb2\n"
        "_b.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'meshnet_gguf._proto.shard.v1.a_pb2', _g)\n"
        "name = 'proto/meshnet/shard/v1/a.proto'\n"
    )
    assert wheel.placed("proto/meshnet/shard/v1/a_pb2.py", source.encode()) == (
        "meshnet_gguf/_proto/shard/v1/a_pb2.py",
        moved.encode(),
    )
    assert wheel.placed("python/meshnet/x.json", b"proto") == ("meshnet/x.json", b"proto")
    for name, text in [
        ("python/meshnet/x.py", "from proto.meshnet.other.v1 import a_pb2\n"),
        ("python/meshnet/x.py", "import proto.other\n"),
        ("proto/meshnet/other/v1/a_pb2.py", ""),
    ]:
        with pytest.raises(ValueError, match="nobody owns"):
            wheel.placed(name, text.encode())


def test_an_index_is_signed_or_says_that_it_is_not(tmp_path: pathlib.Path) -> None:
    artifact = tmp_path / "a.tar.gz"
    artifact.write_bytes(b"content")
    key = SigningKey.generate()
    index.publish("1.0", [artifact], tmp_path / "signed", key)
    content = (tmp_path / "signed/index.json").read_bytes()
    signature = (tmp_path / "signed/index.json.sig").read_bytes()
    assert key.trust().verify("release", content, key.key_id, signature)
    assert json.loads(content)["signed_by"] == key.key_id
    assert (tmp_path / "signed/a.tar.gz").read_bytes() == b"content"
    index.publish("1.0", [artifact], tmp_path / "signed", None)
    assert not (tmp_path / "signed/index.json.sig").exists()
    listed = json.loads((tmp_path / "signed/index.json").read_bytes())
    assert listed == {
        "version": "1.0",
        "signed_by": "unsigned",
        "artifacts": [
            {"name": "a.tar.gz", "sha256": hashlib.sha256(b"content").hexdigest(), "size": 7}
        ],
    }
