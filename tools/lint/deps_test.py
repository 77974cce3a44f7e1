"""deps.yaml names everything that the build pins, with its version, and nothing else."""

import json
import os
import pathlib
import re
from typing import Any

import pytest
import yaml

# The work tree itself: the shims are modules of their own, whose files are no targets of ours.
RUNFILES = pathlib.Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
ROOT = (RUNFILES / "MODULE.bazel").resolve().parent
DEPENDENCIES: list[dict[str, Any]] = yaml.safe_load((ROOT / "third_party/deps.yaml").read_text())


def of_source(source: str) -> list[dict[str, Any]]:
    return [entry for entry in DEPENDENCIES if entry["source"] == source]


def collected(field: str) -> list[str]:
    return sorted(value for entry in DEPENDENCIES for value in entry.get(field, []))


def listed(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


AARCH64 = listed("tools/buildroot/aarch64-packages.txt")


@pytest.mark.parametrize("entry", DEPENDENCIES, ids=lambda entry: str(entry["name"]))
def test_entry_is_complete(entry: dict[str, Any]) -> None:
    required = {"name", "purpose", "version", "licence", "source", "url", "use"}
    assert (
        required
        <= set(entry)
        <= required
        | {
            "packages",
            "modules",
            "libraries",
            "copyright",
            "lanes",
        }
    )
    assert all(isinstance(entry[field], str) and entry[field] for field in required)
    assert entry["source"] in {"debian", "llama_cpp", "model", "npm", "pypi", "sdk"}
    assert entry["use"] in {"build", "program", "test"}


def test_names_are_unique() -> None:
    names = [entry["name"] for entry in DEPENDENCIES]
    assert len(names) == len(set(names))


def test_programs_contain_no_copyleft() -> None:
    copyleft = {
        entry["name"]
        for entry in DEPENDENCIES
        if entry["use"] == "program" and re.search(r"\bL?GPL", entry["licence"])
    }
    assert copyleft == {"GCC"}  # whose run-time libraries have an exception for that


def test_bazel_modules() -> None:
    modules = re.findall(r'^bazel_dep\(name = "([^"]+)"', (ROOT / "MODULE.bazel").read_text(), re.M)
    assert collected("modules") == sorted(modules)


def test_debian_packages() -> None:
    packages = listed("tools/buildroot/root-packages.txt")
    packages |= listed("tools/buildroot/sysroot-packages.txt")
    modules = (ROOT / "MODULE.bazel").read_text()
    for rule in re.findall(r"^debian_repository\((.*?)^\)", modules, re.M | re.S):
        [names] = re.findall(r"packages = \[(.*?)\]", rule, re.S)
        packages |= set(re.findall(r'"(.*?)"', names))
    named = [package for entry in of_source("debian") for package in entry["packages"]]
    assert sorted(named) == sorted(packages)


def test_libraries_of_aarch64_are_those_of_the_sysroot() -> None:
    libraries = {name.removesuffix(":arm64") for name in AARCH64 if name.endswith(":arm64")}
    # The compiler's come with it, and nobody runs a sanitizer there.
    sysroot = listed("tools/buildroot/sysroot-packages.txt")
    assert libraries == {name for name in sysroot if name.endswith("-dev")}


def test_sdks() -> None:
    packages = listed("tools/buildroot/rocm-packages.txt")
    packages |= listed("tools/buildroot/vulkan-packages.txt")
    packages |= {name for name in AARCH64 if not name.endswith(":arm64")}
    packages |= {line.split("==")[0] for line in listed("third_party/sdk/cuda.lock")}
    named = [package for entry in of_source("sdk") for package in entry["packages"]]
    assert sorted(named) == sorted(packages)


def test_linked_libraries() -> None:
    linked = set()
    for build in (ROOT / "third_party").glob("*/BUILD.bazel"):
        linked |= set(re.findall(r'"-l:lib([^"]+)\.a"', build.read_text()))
        if "-l:libabsl_" in build.read_text():
            linked.add("absl_*")
    assert set(collected("libraries")) == linked


def test_python_packages() -> None:
    # Also what the packages that we name need: it is installed with them.
    lock = (ROOT / "third_party/python/requirements.lock").read_text()
    versions = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", lock, re.M))
    assert listed("third_party/python/requirements.in") <= {e["name"] for e in of_source("pypi")}
    assert {entry["name"].lower(): entry["version"] for entry in of_source("pypi")} == versions


def test_python_packages_of_the_wheel() -> None:
    top = listed("third_party/python/requirements.in")
    programs = {entry["name"] for entry in of_source("pypi") if entry["use"] == "program"}
    assert listed("third_party/python/runtime.in") == programs & top
    lock = (ROOT / "third_party/python/runtime.lock").read_text()
    # The same versions; others only for a Python that cannot have them.
    pinned = re.findall(r"^([\w.-]+)==(\S+)( ; .*python_full_version < .*)? ?.*\\$", lock, re.M)
    versions = {entry["name"].lower(): entry["version"] for entry in of_source("pypi")}
    assert {name for name, _, _ in pinned} <= {name.lower() for name in programs}
    assert all(versions[name] == version for name, version, older in pinned if not older)


def test_licence_texts() -> None:
    linked = [entry for entry in of_source("debian") if entry["use"] == "program"]
    assert {entry["name"] for entry in linked if "copyright" not in entry} == set()


def test_pins_of_the_rest() -> None:
    (model,) = of_source("model")
    pin = json.loads((ROOT / "python/meshnet_gguf/models.json").read_text())["smollm2"]
    assert model["packages"] == [pin["package"]]
    assert (model["version"], model["licence"]) == (pin["version"], pin["license"])
    llama, _nlohmann = of_source("llama_cpp")
    manifest = json.loads((ROOT / "third_party/llama_cpp/manifest.json").read_text())
    assert (llama["version"], llama["url"]) == (manifest["release"], manifest["upstream"])
    assert llama["licence"] == manifest["licence"]["spdx"]
    modules = (ROOT / "MODULE.bazel").read_text()
    pinned = re.findall(
        r'^    name = "(buildifier|chromium)",.*?version = "([^"]+)"', modules, re.M | re.S
    )
    assert pinned == [(entry["name"].lower(), entry["version"]) for entry in of_source("npm")]
    bazel = next(entry for entry in DEPENDENCIES if entry["name"] == "Bazel")
    assert bazel["version"] == (ROOT / ".bazelversion").read_text().strip()
