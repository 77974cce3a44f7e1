"""The workflows are well formed, and keep untrusted code away from the cache's password."""

import json
import os
import pathlib
import re
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

SCHEMA = json.loads(pathlib.Path(os.environ["WORKFLOW_SCHEMA"]).read_text())
BAZELRC = pathlib.Path(os.environ["BAZELRC"]).read_text()
FILES = [pathlib.Path(name) for name in os.environ["WORKFLOWS"].split()]
LANES = ("cpu", "cuda", "metal", "rocm", "vulkan")
# What GitHub's own runners do: always there.
HOSTED = ("lavapipe-linux-x86_64-vulkan", "linux-x86_64-cpu", "qemu-linux-aarch64-cpu")


class _Loader(yaml.SafeLoader):
    """As GitHub reads it: `on` is a word, not a truth value."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if tag != "tag:yaml.org,2002:bool"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|false)$"), list("tf"))


def read(file: pathlib.Path) -> dict[str, Any]:
    # The loader is PyYAML's safe one.
    loaded = yaml.load(file.read_text("utf-8"), _Loader)
    assert isinstance(loaded, dict)
    return loaded


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.fixture(params=FILES, ids=lambda file: str(file.name))
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def named(name: str) -> dict[str, Any]:
    (file,) = [file for file in FILES if file.name == name]
    return read(file)


def test_one_runs_ci_and_one_looks_at_upstream_every_week() -> None:
    assert sorted(file.name for file in FILES) == ["ci.yml", "upstream.yml"]
    assert "bash .ci/run" in [step.get("run") for step in steps(named("ci.yml"))]
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", named("upstream.yml")["on"]["schedule"][0]["cron"])


def test_has_the_form_that_github_reads(workflow: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(workflow)
    for job in workflow["jobs"].values():
        assert set(job.get("needs", ())) <= set(workflow["jobs"])


def test_the_schema_refuses(workflow: dict[str, Any]) -> None:
    job = next(iter(workflow["jobs"].values()))
    for broken in [
        {**workflow, "permissions": {"contents": "write"}},
        {**workflow, "jobs": {}},
        {**workflow, "jobs": {"a": {**job, "steps": [{"uses": "actions/checkout"}]}}},
        {**workflow, "jobs": {"a": {**job, "steps": [{"uses": "actions/checkout@v4"}]}}},
        {**workflow, "jobs": {"a": {**job, "steps": [{"run": "x", "uses": f"a/b@{40 * 'a'}"}]}}},
    ]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_its_scripts_are_bash(workflow: dict[str, Any]) -> None:
    for script in [step["run"] for step in steps(workflow) if "run" in step]:
        # Text of others would become part of the script: it comes in by the environment.
        assert "${{" not in script
        checked = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
        assert checked.returncode == 0, script


def test_the_cache_is_written_with_a_secret() -> None:
    assert len([step for step in steps(named("ci.yml")) if "secrets." in json.dumps(step)]) == 1


def test_only_pushes_to_main_see_a_secret(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        assert "secrets." not in json.dumps({**job, "steps": []})
    with_secret = [step for step in steps(workflow) if "secrets." in json.dumps(step)]
    for step in with_secret:
        assert step["if"] == "github.event_name == 'push' && github.ref == 'refs/heads/main'"
    writers = [step for step in steps(workflow) if "cache_write" in step.get("run", "")]
    assert writers == with_secret


def test_every_config_that_it_names_exists(workflow: dict[str, Any]) -> None:
    for step in steps(workflow):
        for config in re.findall(r"--config=(\w+)", step.get("run", "")):
            assert re.search(rf"^(build|test|common):{config} ", BAZELRC, re.MULTILINE), config
        for lane in re.findall(r"--platforms=//platforms:(\w+)", step.get("run", "")):
            assert lane in LANES


def test_every_lane_has_a_job_and_says_when_it_is_unavailable() -> None:
    jobs = named("ci.yml")["jobs"]
    assert {name.rpartition("-")[2] for name in jobs} == set(LANES)
    for name, job in jobs.items():
        if name in HOSTED:
            assert "if" not in job
            assert "${{" not in job["name"]
            assert job["runs-on"] == "ubuntu-24.04"
            continue
        (variable,) = re.findall(r"^vars\.(\w+_RUNNER) != ''$", job["if"])
        assert job["runs-on"] == f"${{{{ vars.{variable} }}}}"
        # Skipped, not green, and its name has the reason.
        assert f"vars.{variable} == '' && ': unavailable, " in job["name"]


def test_no_lane_passes_because_nothing_fits_it() -> None:
    for name, job in named("ci.yml")["jobs"].items():
        lane = name.rpartition("-")[2]
        script = "\n".join(step.get("run", "") for step in job["steps"])
        if name == "qemu-linux-aarch64-cpu":
            assert "tools/sdk install aarch64\n" in script
            assert "tools/bazel build --config=ci --config=aarch64 //cc/worker\n" in script
            assert "..." not in script
        if lane == "cpu":
            continue
        lines = re.findall(
            rf"^tools/bazel (?:build|test) --config=ci .*--config={lane} .*$", script, re.M
        )
        assert len(lines) == 2, name
        # Bazel leaves incompatible targets out of a pattern, and refuses one that is named.
        assert not any("..." in line for line in lines)
        if lane in ("rocm", "vulkan"):
            assert f"tools/sdk install {lane}\n" in script
