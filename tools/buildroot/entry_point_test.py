"""tools/bazel makes, reuses and enters build roots; packages and Bazel itself are stand-ins."""

import pathlib
import re
import shutil
import signal
import subprocess
import tarfile
import time

import pytest

HERE = pathlib.Path(__file__).parent
LOCAL_ENVIRONMENTAL_ISSUE = 36

# What the stand-in for the build root holds, with the libraries that they need.
PROGRAMS = ("bash", "cat")

BAZEL = """\
#!/usr/bin/bash
echo "arguments: $*"
echo "folder: $PWD"
echo "input: $(cat)"
[[ ! -e /opt/sdk/arm/packages.txt ]] || echo "sdk: $(cat /opt/sdk/arm/packages.txt)"
exit 7
"""

MMDEBSTRAP = """\
#!/bin/bash
# Stand-in: counts its calls, does what HOOK says, and writes the suite's tree.
echo "$*" >>"$CALLS"
[[ -z ${HOOK:-} ]] || source "$HOOK"
for word in "$@"; do suite=$target; target=$word; done
exec cat "$TREES/$suite.tar"
"""

WAIT = "wait_for() { until [[ -e $1 ]]; do sleep 0.02; done; }; wait_for"


def needed_libraries(program: str) -> set[str]:
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(/[^ ]+)", listing))


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Tar files of a tiny build root and a tiny sysroot."""
    folder = tmp_path_factory.mktemp("trees")
    root = folder / "forky"
    files = {}
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        files[f"usr/bin/{name}"] = program
        files |= {library.lstrip("/"): library for library in needed_libraries(program)}
    for place, file in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / place)
    for name in ("proc", "sys", "dev", "tmp", "opt", "etc", "var/lib/dpkg", "usr/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "usr/bin/bazel").write_text(BAZEL)
    (root / "usr/bin/bazel").chmod(0o755)
    (root / "var/lib/dpkg/status").write_text(
        "Package: bazel-bootstrap\nStatus: install ok installed\nMaintainer: nobody\n"
        "Architecture: amd64\nVersion: 7.7.1+ds-1\nDescription: stand-in\n\n"
    )
    sysroot = folder / "bookworm"
    (sysroot / "usr/lib").mkdir(parents=True)
    (sysroot / "usr/lib/absolute.so").symlink_to("/usr/lib/real.so")
    (sysroot / "usr/lib/real.so").write_text("real")
    for tree in (root, sysroot):
        with tarfile.open(folder / f"{tree.name}.tar", "w") as archive:
            archive.add(tree, arcname=".")
    return folder


class Machine:
    """A work tree with tools/bazel, a cache folder and a PATH with stand-ins."""

    def __init__(self, folder: pathlib.Path, trees: pathlib.Path) -> None:
        self.tree = folder / "tree"
        self.cache = folder / "cache"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        (self.tree / "tools/buildroot").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(HERE.parent / "bazel", self.tree / "tools/bazel")
        for file in (
            "make.sh",
            "enter.sh",
            "place.sh",
            "root-packages.txt",
            "sysroot-packages.txt",
        ):
            shutil.copy(HERE / file, self.tree / "tools/buildroot" / file)
        self.stand_in("mmdebstrap", MMDEBSTRAP)
        self.environment = {
            "CALLS": str(self.calls),
            "HOME": str(folder),
            "MESHNET_CACHE": str(self.cache),
            "PATH": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
            "TREES": str(trees),
        }

    def stand_in(self, name: str, script: str) -> None:
        """Puts a program in front of the PATH."""
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """Starts tools/bazel."""
        return subprocess.Popen(
            [self.tree / "tools/bazel", *arguments],
            cwd=self.tree,
            env=self.environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, text: str = "", **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Runs tools/bazel to its end."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(text, timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def hook(self, script: str) -> str:
        """A script that every mmdebstrap call runs first; the value for HOOK."""
        path = self.bin.parent / "hook"
        path.write_text(script)
        return str(path)

    def roots(self) -> list[str]:
        """What lies in the build roots' folder, without locks and settings."""
        folder = self.cache / "buildroot"
        return sorted(
            entry.name
            for entry in folder.iterdir()
            if not entry.name.endswith((".lock", ".bazelrc"))
        )

    def number_of_calls(self) -> int:
        """How often mmdebstrap was called so far."""
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: pathlib.Path, trees: pathlib.Path) -> Machine:
    return Machine(tmp_path, trees)


def wait_for(path: pathlib.Path) -> None:
    """Waits until another process has made the file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_runs_bazel_in_the_root_and_passes_everything_through(machine: Machine) -> None:
    result = machine.run("run", "//:demo", "--", "a b", text="hello")
    assert result.returncode == 7, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("run //:demo -- a b")
    assert f"--output_user_root={machine.cache}/bazel/" in lines[0]
    assert lines[1:] == [f"folder: {machine.tree}", "input: hello"]


def test_bazelisk_goes_the_same_way(machine: Machine) -> None:
    result = machine.run("version", BAZEL_REAL="/usr/bin/false")
    assert result.returncode == 7
    assert result.stdout.splitlines()[0].endswith("version")


def test_second_call_reuses_the_root(machine: Machine) -> None:
    first = machine.run("version")
    assert "making the build root" in first.stderr
    second = machine.run("version")
    assert second.returncode == 7
    assert "build root" not in second.stderr
    assert machine.number_of_calls() == 2  # the root and its sysroot
    assert len(machine.roots()) == 1


@pytest.mark.parametrize("file", ["root-packages.txt", "sysroot-packages.txt", "make.sh"])
def test_changed_content_makes_a_new_root(machine: Machine, file: str) -> None:
    machine.run("version")
    before = machine.roots()
    with (machine.tree / "tools/buildroot" / file).open("a") as content:
        content.write("# changed\n")
    assert machine.run("version").returncode == 7
    assert len(machine.roots()) == 2
    assert set(before) < set(machine.roots())


def test_sysroot_links_stay_inside_it(machine: Machine) -> None:
    machine.run("version")
    (name,) = machine.roots()
    link = machine.cache / "buildroot" / name / "opt/sysroot/usr/lib/absolute.so"
    assert not link.readlink().is_absolute()
    assert link.read_text() == "real"


def test_failure_keeps_nothing(machine: Machine) -> None:
    result = machine.run("version", HOOK=machine.hook("echo no mirror >&2; exit 1"))
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "no mirror" in result.stderr
    assert "nothing was kept" in result.stderr
    assert machine.roots() == []
    assert machine.run("version").returncode == 7


def test_other_bazel_version_is_refused(machine: Machine) -> None:
    make = machine.tree / "tools/buildroot/make.sh"
    make.write_text(make.read_text().replace("BAZEL_VERSION=7.7.1", "BAZEL_VERSION=7.7.2"))
    result = machine.run("version")
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "expected Bazel 7.7.2" in result.stderr
    assert "found bazel-bootstrap 7.7.1+ds-1" in result.stderr
    assert machine.roots() == []


def test_termination_keeps_nothing(machine: Machine, tmp_path: pathlib.Path) -> None:
    hook = machine.hook(f"touch {tmp_path}/started; sleep 600")
    process = machine.start("version", HOOK=hook)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert machine.roots() == []


def test_what_a_killed_creation_left_is_removed(machine: Machine, tmp_path: pathlib.Path) -> None:
    hook = machine.hook(f"touch {tmp_path}/started; {WAIT} {tmp_path}/gate; exit 1")
    with machine.start("version", HOOK=hook) as process:
        wait_for(tmp_path / "started")
        process.kill()
    assert [".making." in name for name in machine.roots()] == [True]
    # The killed one's children go on until their mmdebstrap ends, and keep the lock until then.
    waiting = machine.start("version")
    assert waiting.stderr is not None
    assert "another process is making the build root" in waiting.stderr.readline()
    (tmp_path / "gate").touch()
    assert waiting.communicate("", timeout=120)[0].endswith("input: \n")
    assert waiting.returncode == 7
    assert [".making." in name for name in machine.roots()] == [False]


def test_sdks_are_seen_at_one_path(machine: Machine) -> None:
    assert machine.run("version").returncode == 7
    (root,) = machine.roots()
    sdk = machine.cache / "sdk" / root / "arm"
    sdk.mkdir()
    (sdk / "packages.txt").write_text("gcc-arm\n")
    assert machine.run("version").stdout.endswith("sdk: gcc-arm\n")


def test_two_at_once_make_one_root(machine: Machine, tmp_path: pathlib.Path) -> None:
    hook = machine.hook(f"touch {tmp_path}/started; {WAIT} {tmp_path}/gate")
    first = machine.start("version", HOOK=hook)
    wait_for(tmp_path / "started")
    second = machine.start("version", HOOK=hook)
    assert second.stderr is not None
    assert "another process is making the build root" in second.stderr.readline()
    (tmp_path / "gate").touch()
    for process in (first, second):
        process.communicate("", timeout=120)
        assert process.returncode == 7
    assert machine.number_of_calls() == 2
    assert len(machine.roots()) == 1


def test_missing_mmdebstrap_says_what_to_run(machine: Machine) -> None:
    (machine.bin / "mmdebstrap").unlink()
    result = machine.run("version")
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "    apt-get update && apt-get install -y mmdebstrap" in result.stderr


def test_ordinary_user_without_mmdebstrap_is_told_to_use_sudo(machine: Machine) -> None:
    (machine.bin / "mmdebstrap").unlink()
    machine.stand_in("id", '#!/bin/sh\n[ "$1" = -un ] && echo somebody || echo 1000\n')
    result = machine.run("version")
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert re.search(
        r"^    sudo apt-get update && sudo apt-get install -y mmdebstrap( debian-archive-keyring)?"
        r"( uidmap)?$",
        result.stderr,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("user", "advice"),
    [
        ("0", r"docker run --privileged"),
        ("1000", r"sudo (sysctl -w \S+=\d+|\S*tools/bazel version)$"),
    ],
)
def test_no_namespaces_says_what_to_run(machine: Machine, user: str, advice: str) -> None:
    machine.stand_in("id", f"#!/bin/sh\necho {user}\n")
    machine.stand_in("unshare", "#!/bin/sh\nexit 1\n")
    result = machine.run("version")
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "may not make namespaces" in result.stderr
    assert re.search(rf"^    {advice}", result.stderr, re.MULTILINE)
    assert machine.number_of_calls() == 0


def test_cache_inside_the_work_tree_is_refused(machine: Machine) -> None:
    result = machine.run("version", MESHNET_CACHE=str(machine.tree / "cache"))
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "set MESHNET_CACHE to a folder outside it" in result.stderr


def test_host_config_runs_the_machines_own_bazel(machine: Machine) -> None:
    machine.stand_in("real", '#!/bin/sh\necho "real $*"\nexit 5\n')
    result = machine.run("build", "--config=host", "//x", BAZEL_REAL=str(machine.bin / "real"))
    assert (result.returncode, result.stdout) == (5, "real build --config=host //x\n")
    assert machine.number_of_calls() == 0


def test_host_config_without_a_bazel_is_refused(machine: Machine) -> None:
    if shutil.which("bazel", path="/usr/bin:/bin"):
        machine.environment["PATH"] = str(machine.bin)
        for name in ("bash", "dirname", "uname", "env"):
            program = shutil.which(name)
            assert program is not None
            (machine.bin / name).symlink_to(program)
    result = machine.run("build", "--config=host")
    assert result.returncode == LOCAL_ENVIRONMENTAL_ISSUE
    assert "Install bazelisk" in result.stderr


def test_program_arguments_are_not_taken_for_configs(machine: Machine) -> None:
    result = machine.run("run", "//x", "--", "--config=host")
    assert result.returncode == 7
    assert result.stdout.splitlines()[0].endswith("run //x -- --config=host")
