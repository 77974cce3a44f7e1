"""The artifacts of a release, and its installer."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping

import pytest
from meshnet.signing import SigningKey

from release import index, pack

TARBALL = pathlib.Path(os.environ["TARBALL"]).absolute()
WHEEL = pathlib.Path(os.environ["WHEEL"]).absolute()
REQUIREMENTS = pathlib.Path(os.environ["REQUIREMENTS"]).absolute()
MIB = 1 << 20


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


def changed(
    unpacked: pathlib.Path, folder: pathlib.Path, changes: Mapping[str, bytes]
) -> pathlib.Path:
    """The unpacked release with some files replaced, whole in itself."""
    made = folder / "changed"
    shutil.copytree(unpacked, made, copy_function=os.link)
    for name, content in changes.items():
        mode = (made / name).stat().st_mode
        (made / name).unlink()
        (made / name).write_bytes(content)
        (made / name).chmod(mode)
    sums = made / pack.SUMS
    names = [line.partition("  ")[2] for line in sums.read_text().splitlines()]
    sums.unlink()
    sums.write_text(
        "".join(f"{hashlib.sha256((made / n).read_bytes()).hexdigest()}  {n}\n" for n in names)
    )
    return made


def replaced(file: pathlib.Path, old: str, new: str) -> bytes:
    content = file.read_bytes()
    assert old.encode() in content
    return content.replace(old.encode(), new.encode())


def stand_in_for_the_next_release(unpacked: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A release with a script in the worker's place, which says that it is a later version."""
    identity = json.loads((unpacked / "identity.json").read_text())
    identity |= {"version": f"9.{identity['version']}", "fingerprint": "f" * 64}
    script = b'#!/bin/sh\nexec cat "$(dirname "$(readlink -f "$0")")/../identity.json"\n'
    return changed(
        unpacked,
        folder,
        {
            "bin/meshnet-worker": script,
            "identity.json": (json.dumps(identity, indent=2) + "\n").encode(),
        },
    )


def test_installed_upgraded_rolled_back_and_removed(
    unpacked: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    home = tmp_path / "home"
    prefix = home / "with space"
    place = ("--prefix", str(prefix))
    program = prefix / "bin/meshnet-worker"
    flags = prefix / "etc/meshnet/worker.flags"

    def identity() -> dict[str, str]:
        said = subprocess.run([program, "--version", "--json"], capture_output=True, check=True)
        loaded = json.loads(said.stdout)
        assert isinstance(loaded, dict)
        return loaded

    first = install(unpacked, *place)
    assert first.returncode == 0, first.stderr
    old = identity()
    unit = (prefix / "share/systemd/user/meshnet-worker.service").read_text()
    assert f"--flagfile={flags}" in unit
    assert "@" not in unit.split("[Unit]")[1]
    flags.write_text("--engine=fake\n")
    data = prefix / "share/models/model.gguf"
    data.parent.mkdir()
    data.write_bytes(b"GGUF")
    assert "no earlier version" in install(unpacked, *place, "--rollback").stderr
    # The same again changes nothing.
    assert install(unpacked, *place).returncode == 0
    store = prefix / "share/meshnet-worker"
    assert not (store / "previous").exists()
    assert len(list((store / "versions").iterdir())) == 1

    upgraded = install(stand_in_for_the_next_release(unpacked, tmp_path), *place)
    assert upgraded.returncode == 0, upgraded.stderr
    new = identity()
    assert new["version"] != old["version"]
    assert new["fingerprint"] != old["fingerprint"]
    # Both lie there, and each can be gone back to.
    assert sorted(path.name for path in (store / "versions").iterdir()) == sorted(
        f"{one['version']}-{one['fingerprint'][:12]}" for one in (old, new)
    )
    assert install(unpacked, *place, "--rollback").returncode == 0
    assert identity() == old
    assert install(unpacked, *place, "--rollback").returncode == 0
    assert identity() == new
    assert flags.read_text() == "--engine=fake\n"
    assert install(unpacked, *place, "--uninstall").returncode == 0
    left = [path for path in home.rglob("*") if not path.is_dir()]
    assert sorted(left) == sorted([flags, data])
    assert install(unpacked, *place, "--uninstall").returncode == 1


def fake_programs(folder: pathlib.Path, **prints: str) -> str:
    """A PATH with stand-ins for programs of the machine, which print what another's would."""
    made = folder / f"fake_{len(list(folder.iterdir()))}"
    made.mkdir()
    for name, text in prints.items():
        script = made / name.replace("_", "-")
        # uname is asked for the system and for the CPU.
        script.write_text(f'#!/bin/sh\nif [ "$1" = -s ]; then echo Linux; else echo "{text}"; fi\n')
        script.chmod(0o755)
    return f"{made}:/usr/bin:/bin"


def test_refuses_machines_that_do_not_fit(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = ("--prefix", str(tmp_path / "target"))
    refused = install(unpacked, *target, PATH=fake_programs(tmp_path, uname="aarch64"))
    assert refused.returncode == 1
    assert "lane: this release is for x86_64 CPUs, the machine has a aarch64 one" in refused.stderr
    refused = install(unpacked, *target, PATH=fake_programs(tmp_path, getconf="glibc 2.31"))
    assert refused.returncode == 1
    assert "glibc: this release needs 2.36 or later, the machine has 2.31" in refused.stderr
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu cx16 lahf_lm pni popcnt sse4_1 ssse3\n")
    refused = install(unpacked, *target, MESHNET_CPUINFO=str(cpuinfo))
    assert refused.returncode == 1
    assert "CPU: this release needs x86-64-v2, this CPU has no sse4_2" in refused.stderr
    cpuinfo.write_text(cpuinfo.read_text().strip() + " sse4_2\n")
    assert install(unpacked, *target, MESHNET_CPUINFO=str(cpuinfo)).returncode == 0


_NVIDIA = "libcuda.so.1 (libc6,x86-64) => /lib/libcuda.so.1"
_VULKAN = "libvulkan.so.1 (libc6,x86-64) => /lib/libvulkan.so.1"
_OTHER_PROGRAM = "identity: the program does not say of itself what identity.json says"


@pytest.mark.parametrize(
    ("lane", "machine", "variables", "said"),
    [
        (
            *("cuda", {"ldconfig": ""}, {}),
            "driver: the cuda lane needs NVIDIA's driver 580 or later, there is no libcuda.so.1",
        ),
        (
            *("cuda", {"ldconfig": _NVIDIA, "nvidia_smi": "570.133.20"}, {}),
            "driver: the cuda lane needs NVIDIA's driver 580 or later, the machine has 570.133.20",
        ),
        ("cuda", {"ldconfig": _NVIDIA, "nvidia_smi": "580.65.06"}, {}, _OTHER_PROGRAM),
        (
            *("rocm", {}, {}),
            "driver: the rocm lane needs the kernel's amdgpu driver, there is no /dev/kfd",
        ),
        (
            *("vulkan", {"ldconfig": ""}, {}),
            "driver: the vulkan lane needs Vulkan's loader, there is no libvulkan.so.1",
        ),
        ("vulkan", {"ldconfig": _VULKAN}, {"VK_DRIVER_FILES": "/x.json"}, _OTHER_PROGRAM),
        ("tpu", {}, {}, "lane: this installer knows no driver for tpu"),
    ],
)
def test_refuses_a_lane_without_its_driver(
    unpacked: pathlib.Path,
    tmp_path: pathlib.Path,
    lane: str,
    machine: dict[str, str],
    variables: dict[str, str],
    said: str,
) -> None:
    # The program is the cpu lane's: a machine that has the driver refuses it for that.
    identity = json.loads((unpacked / "identity.json").read_text())
    identity["lane"]["accelerator"] = lane
    identity["toolchain"] = {"accelerator": "sdk 1.0", **identity["toolchain"]}
    other = (json.dumps(identity, indent=2) + "\n").encode()
    refused = install(
        changed(unpacked, tmp_path, {"identity.json": other}),
        *("--prefix", str(tmp_path / "target")),
        PATH=fake_programs(tmp_path, **machine),
        **variables,
    )
    assert refused.returncode == 1
    assert said in refused.stderr
    assert not (tmp_path / "target").exists()


def test_refuses_a_program_whose_libraries_are_missing(
    unpacked: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    # Linked with libm.so.6 under a name that no machine has, as a GPU's with those of its SDK.
    file = "bin/meshnet-worker"
    other = replaced(unpacked / file, "\0libm.so.6\0", "\0libq.so.6\0")
    release = changed(unpacked, tmp_path, {file: other})
    place = ("--prefix", str(tmp_path / "target"))
    refused = install(release, *place)
    assert refused.returncode == 1
    assert "libraries: the cpu lane needs libq.so.6; install them, or give" in refused.stderr
    libraries = tmp_path / "libraries"
    refused = install(release, *place, "--libraries", str(libraries))
    assert f"there is no folder {libraries}" in refused.stderr
    assert not (tmp_path / "target").exists()
    libraries.mkdir()
    listed = subprocess.run(
        ["ldd", unpacked / file], capture_output=True, text=True, check=True
    ).stdout
    (real,) = re.findall(r"libm[.]so[.]6 => (\S+)", listed)
    (libraries / "libq.so.6").symlink_to(real)
    accepted = install(release, *place, "--libraries", str(libraries))
    assert accepted.returncode == 0, accepted.stderr
    assert (tmp_path / "target/share/meshnet-worker/current/lib").readlink() == libraries


def test_refuses_what_was_changed(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(unpacked, copy)
    target = ("--prefix", str(tmp_path / "target"))
    (copy / "NOTICE").write_text("other")
    assert "checksums: a file differs" in install(copy, *target).stderr
    shutil.copyfile(unpacked / "NOTICE", copy / "NOTICE")
    (copy / "bin/extra").write_text("x")
    assert "checksums: SHA256SUMS does not list bin/extra" in install(copy, *target).stderr
    (copy / "bin/extra").unlink()
    (copy / "link").symlink_to("/etc/passwd")
    assert "checksums: SHA256SUMS does not list link" in install(copy, *target).stderr
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
    # The worker for aarch64 is among them where its SDK is installed.
    files = [pathlib.Path(name).absolute() for name in os.environ["ARTIFACTS"].split()]
    assert {TARBALL, WHEEL, REQUIREMENTS} <= set(files)
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
