"""The tarball for aarch64 Linux, made on another CPU; its program runs under qemu."""

import json
import os
import pathlib
import subprocess

TARBALL = pathlib.Path(os.environ["TARBALL"]).absolute()
WORKER = pathlib.Path(os.environ["WORKER"]).absolute()
EM_AARCH64 = 183
MIB = 1 << 20


def test_the_program_is_for_aarch64_and_says_so(unpacked: pathlib.Path) -> None:
    assert TARBALL.stat().st_size < 30 * MIB
    program = (unpacked / "bin/meshnet-worker").read_bytes()
    assert int.from_bytes(program[18:20], "little") == EM_AARCH64
    said = subprocess.run([WORKER, "--version", "--json"], capture_output=True, check=True).stdout
    assert said == (unpacked / "identity.json").read_bytes()
    identity = json.loads(said)
    assert identity["lane"] == {"accelerator": "cpu", "cpu": "aarch64", "os": "linux"}
    assert identity["toolchain"]["baseline"] == "armv8-a"
    assert identity["toolchain"]["cpu_variants"] == "armv8 dotprod i8mm"


def test_the_program_takes_its_identity_file_and_no_other(
    unpacked: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    identity = json.loads((unpacked / "identity.json").read_text())
    identity["lane"]["cpu"] = "x86_64"
    other = tmp_path / "identity.json"
    other.write_text(json.dumps(identity))
    flags = ["--engine=fake", "--layers=0:8", f"--identity={other}"]
    ended = subprocess.run(
        [WORKER, *flags], capture_output=True, check=False, timeout=120, text=True
    )
    assert ended.returncode == 5, ended.stderr
    assert "`lane.cpu` x86_64, this one has aarch64" in ended.stderr


def test_another_cpu_is_refused_by_name(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ended = subprocess.run(
        [unpacked / "install.sh", "--prefix", tmp_path / "target"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 1
    assert "lane: this release is for aarch64 CPUs, the machine has a x86_64 one" in ended.stderr
