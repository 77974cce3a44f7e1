"""Packaging gives the same bytes whoever does it, wherever and whenever.

The same steps run twice, as two machines would: in folders of other names, with files of another
age and other rights, another umask, locale, time zone, home and seed of hashes.
`tools/reproducible` compares two whole builds.
"""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
DEPS = pathlib.Path(os.environ["DEPS_YAML"]).absolute()
CONTENT = {
    "bin/program": b"\x7fELF" + bytes(range(256)) * 40,
    "python/pkg/z.py": b"Z = 1\n",
    "python/pkg/a.py": b"A = 1\n",
    "licenses/B.txt": b"b\n",
    "licenses/A.txt": b"a\n",
    "LICENSE": b"text\n",
    "requirements.in": b"# comment\nnumpy\n",
}
MACHINES: list[dict[str, str]] = [
    {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1", "HOME": "/", "USER": "a"},
    {
        "LC_ALL": "C.UTF-8",
        "TZ": "Asia/Kathmandu",
        "PYTHONHASHSEED": "77",
        "HOME": "/tmp",
        "USER": "b",
        "SOURCE_DATE_EPOCH": "1500000000",
    },
]


def run(tool: str, arguments: list[str], folder: pathlib.Path, machine: int) -> None:
    environment = {"PATH": "/usr/bin:/bin", **MACHINES[machine]}
    subprocess.run(
        [HERE / tool, *arguments],
        cwd=folder,
        env=environment,
        check=True,
        umask=(0o022, 0o077)[machine],
    )


def package(folder: pathlib.Path, machine: int) -> dict[str, bytes]:
    """All that is packaged, by name, made in a folder."""
    names = sorted(CONTENT, reverse=machine == 1)
    for name in names:
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT[name])
        path.chmod((0o644, 0o600)[machine])
        os.utime(path, (machine * 10**9, machine * 10**9))
    listed = [name for name in sorted(CONTENT) if name.startswith("python/")]
    (folder / "list").write_text("".join(f"{name}\tin/{name}\n" for name in listed))
    for product in ("worker", "wheel"):
        notices = ["--notice", f"{product}.NOTICE", "--sbom", f"{product}.sbom"]
        run(
            "notice",
            ["--deps", str(DEPS), "--product", product, "--version", "1.2.3", *notices],
            folder,
            machine,
        )
    members = ["bin/program=in/bin/program", "licenses=in/licenses", "NOTICE=worker.NOTICE"]
    run("pack", ["--out", "x.tar.gz", "--root", "x-1.2.3", *members], folder, machine)
    run(
        "wheel",
        [
            *("--out", "x.whl", "--version", "1.2.3", "--requirements", "in/requirements.in"),
            *("--list", "list", "--notice", "wheel.NOTICE", "--sbom", "wheel.sbom"),
            *("--licence", "in/LICENSE"),
        ],
        folder,
        machine,
    )
    artifacts = ["x.tar.gz", "x.whl"]
    order = artifacts if machine == 0 else artifacts[::-1]
    run(
        "indexer",
        ["--index_only", "--out", "index.json", "--version", "1.2.3", "--artifacts", *order],
        folder,
        machine,
    )
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name[0] in "xiw" and path.is_file()
    }


def test_two_machines_package_the_same_bytes(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "one", tmp_path / "another folder" / "deeper"
    first.mkdir()
    second.mkdir(parents=True)
    made = package(first, 0)
    again = package(second, 1)
    assert sorted(made) == [
        "index.json",
        "wheel.NOTICE",
        "wheel.sbom",
        "worker.NOTICE",
        "worker.sbom",
        "x.tar.gz",
        "x.whl",
    ]
    assert [name for name in made if made[name] != again[name]] == []


@pytest.mark.parametrize("name", ["bin/program", "licenses/A.txt"])
def test_other_content_gives_other_bytes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    made = package(tmp_path / "a", 0)
    monkeypatch.setitem(CONTENT, name, b"other")
    assert package(tmp_path / "b", 0)["x.tar.gz"] != made["x.tar.gz"]
