"""The artifacts of a release, and its installer."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from meshnet.signing import SigningKey

from release import index

TARBALL = pathlib.Path(os.environ["TARBALL"]).absolute()
WHEEL = pathlib.Path(os.environ["WHEEL"]).absolute()
MIB = 1 << 20


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(TARBALL) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    assert root.name == TARBALL.name.removesuffix(".tar.gz")
    return root


def install(
    folder: pathlib.Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "install.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": "/usr/bin:/bin", **variables},
    )


def test_the_tarball_holds_what_an_operator_needs(unpacked: pathlib.Path) -> None:
    assert TARBALL.stat().st_size < 30 * MIB
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}
    assert {
        "LICENSE",
        "NOTICE",
        "SHA256SUMS",
        "bin/meshnet-worker",
        "identity.json",
        "install.sh",
        "licenses/OpenSSL.txt",
        "licenses/gRPC.txt",
        "licenses/llama.cpp.txt",
        "meshnet-worker.service",
        "sbom.cdx.json",
        "worker.flags.sample",
    } <= names
    assert not any(name.endswith((".cpp", ".h", ".cc")) for name in names)
    bill = json.loads((unpacked / "sbom.cdx.json").read_text())
    texts = {path.stem for path in (unpacked / "licenses").iterdir()}
    components = {entry["name"] for entry in bill["components"]}
    assert {name.replace(" ", "-").replace("/", "-") for name in components} == texts


def test_the_program_says_what_the_identity_file_says(unpacked: pathlib.Path) -> None:
    worker = unpacked / "bin/meshnet-worker"
    said = subprocess.run([worker, "--version", "--json"], capture_output=True, check=True).stdout
    assert said == (unpacked / "identity.json").read_bytes()
    identity = json.loads(said)
    assert identity["lane"] == {"accelerator": "cpu", "cpu": "x86_64", "os": "linux"}
    assert identity["version"] in TARBALL.name
    assert identity["certification"] == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lane": {"accelerator": "cuda", "cpu": "x86_64", "os": "linux"}}, 5),
        ({"version": "9.9.9"}, 5),
        ({"fingerprint": "0" * 64}, 5),
        ({"pins": {"artifacts": ["0" * 64]}}, 5),
        ({"pins": {"recipes": ["0" * 64]}}, 5),
        ({"pins": 1}, 2),
        ({"program": None}, 2),
    ],
)
def test_a_worker_refuses_another_ones_identity(
    unpacked: pathlib.Path, tmp_path: pathlib.Path, change: dict[str, object], code: int
) -> None:
    identity = {**json.loads((unpacked / "identity.json").read_text()), **change}
    (tmp_path / "identity.json").write_text(json.dumps(identity))
    ended = subprocess.run(
        [
            unpacked / "bin/meshnet-worker",
            "--engine=fake",
            "--layers=0:8",
            f"--identity={tmp_path / 'identity.json'}",
        ],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == code, ended.stderr


def test_installed_upgraded_rolled_back_and_removed(
    unpacked: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    home = tmp_path / "home"
    prefix = str(home / "with space")
    first = install(unpacked, "--prefix", prefix)
    assert first.returncode == 0, first.stderr
    program = home / "with space/bin/meshnet-worker"
    flags = home / "with space/etc/meshnet/worker.flags"
    subprocess.run([program, "--version"], check=True, capture_output=True)
    unit = (home / "with space/share/systemd/user/meshnet-worker.service").read_text()
    assert f"--flagfile={flags}" in unit
    assert "@" not in unit.split("[Unit]")[1]
    flags.write_text("--engine=fake\n")
    assert install(unpacked, "--prefix", prefix, "--rollback").returncode == 1
    # The same again changes nothing, and another one lies beside it.
    assert install(unpacked, "--prefix", prefix).returncode == 0
    store = home / "with space/share/meshnet-worker"
    current = (store / "current").readlink()
    assert not (store / "previous").exists()
    other = store / "versions/0.0.1-other"
    shutil.copytree(store / current, other)
    (store / "current").unlink()
    (store / "current").symlink_to("versions/0.0.1-other")
    assert install(unpacked, "--prefix", prefix).returncode == 0
    assert (store / "current").readlink() == current
    assert install(unpacked, "--prefix", prefix, "--rollback").returncode == 0
    assert (store / "current").readlink() == pathlib.Path("versions/0.0.1-other")
    assert install(unpacked, "--prefix", prefix, "--rollback").returncode == 0
    assert (store / "current").readlink() == current
    assert flags.read_text() == "--engine=fake\n"
    assert install(unpacked, "--prefix", prefix, "--uninstall").returncode == 0
    left = [path for path in home.rglob("*") if not path.is_dir()]
    assert left == [flags]
    assert install(unpacked, "--prefix", prefix, "--uninstall").returncode == 1


def test_refuses_machines_that_do_not_fit(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def with_program(name: str, prints: str) -> str:
        folder = tmp_path / f"{name}{len(prints)}"
        folder.mkdir(exist_ok=True)
        script = folder / name
        script.write_text(
            f'#!/bin/sh\nif [ "$1" = -s ]; then echo Linux; else echo "{prints}"; fi\n'
        )
        script.chmod(0o755)
        return f"{folder}:/usr/bin:/bin"

    target = ("--prefix", str(tmp_path / "target"))
    refused = install(unpacked, *target, PATH=with_program("uname", "aarch64"))
    assert refused.returncode == 1
    assert "lane: this release is for x86_64 CPUs, the machine has a aarch64 one" in refused.stderr
    refused = install(unpacked, *target, PATH=with_program("getconf", "glibc 2.31"))
    assert refused.returncode == 1
    assert "glibc: this release needs 2.36 or later, the machine has 2.31" in refused.stderr
    baseline = json.loads((unpacked / "identity.json").read_text())["toolchain"]["baseline"]
    assert baseline in ("x86-64-v2", "x86-64-v3")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu cx16 lahf_lm pni popcnt sse4_1 ssse3\n")
    refused = install(unpacked, *target, MESHNET_CPUINFO=str(cpuinfo))
    assert refused.returncode == 1
    assert f"CPU: this release needs {baseline}, this CPU has no sse4_2" in refused.stderr
    assert not (tmp_path / "target").exists()


def test_refuses_what_was_changed(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unpacked, copy)
    target = ("--prefix", str(tmp_path / "target"))
    (copy / "NOTICE").write_text("other")
    assert "checksums: a file differs" in install(copy, *target).stderr
    shutil.copyfile(unpacked / "NOTICE", copy / "NOTICE")
    (copy / "bin/extra").write_text("x")
    assert "checksums: SHA256SUMS does not list bin/extra" in install(copy, *target).stderr
    assert not (tmp_path / "target").exists()


def test_checks_the_signature(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    key.save(tmp_path / "release.key")
    other.save(tmp_path / "other.key")
    published = tmp_path / "published"
    index.publish("0", [TARBALL], published, key)
    tarball = published / TARBALL.name

    def checked(public: str) -> subprocess.CompletedProcess[str]:
        return install(
            unpacked,
            *("--prefix", str(tmp_path / "target"), "--from", str(tarball)),
            *("--index", str(published / "index.json"), "--key", str(tmp_path / public)),
        )

    assert "was not signed with the key" in checked("other.key.pub").stderr
    good = checked("release.key.pub")
    assert good.returncode == 0, good.stderr
    assert "signature and hash are right" in good.stdout
    tarball.write_bytes(tarball.read_bytes() + b"\0")
    assert "does not list" in checked("release.key.pub").stderr


def test_the_index_lists_every_artifact() -> None:
    listed = json.loads(pathlib.Path(os.environ["INDEX"]).read_text())
    assert listed["signed_by"] == "unsigned"
    files = [TARBALL, WHEEL, pathlib.Path(os.environ["REQUIREMENTS"])]
    assert {entry["name"]: entry["sha256"] for entry in listed["artifacts"]} == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def test_the_wheel_holds_code_and_data_and_no_tests() -> None:
    with zipfile.ZipFile(WHEEL) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("/entry_points.txt"))
        assert "meshnet = meshnet_gguf.cli.meshnet:run" in archive.read(entry).decode()
    assert {
        "meshnet/tracker_server.py",
        "meshnet_gguf/cli/meshnet.py",
        "meshnet_gguf/client/__init__.py",
        "meshnet_gguf/demo.py",
        "meshnet_gguf/models.json",
        "meshnet/_proto/control/v1/tracker_pb2.py",
        "meshnet_gguf/_proto/shard/v1/shard_pb2.py",
        "meshnet_gguf/_proto/shard/v1/shard_pb2_grpc.py",
    } <= set(names)
    assert not [name for name in names if "/tests/" in name or "/testing/" in name]
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"meshnet", "meshnet_gguf"}
