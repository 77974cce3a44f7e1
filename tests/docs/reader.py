"""Somebody who reads documents and does what they say, with a folder for each of two machines.

    reader = Reader(folder, programs, words={"MODEL.gguf": "/srv/model.gguf"}, ...)
    await reader.do(block)
    await reader.end()

A block runs in the folder of its machine, which is also the home folder, in a shell with the PATH
that the blocks before it have exported. What is in the way of running it anywhere stands here, as
scripts on that PATH: they take what the documents give them, and no more.

- `tools/bazel` starts or shows what is built already.
- `scp` copies between the two folders, `curl` asks over HTTP, `sudo` executes.
- `python3 -m venv` makes a virtual environment whose `pip` takes packages of the registry, which it
  compares with the document's list, from this test's own; a wheel it installs as pip does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.docs.blocks import Block

__all__ = ["Programs", "Reader", "exports", "installed"]

_READY = 120.0
_PIP = pathlib.Path(__file__).with_name("stand_in_pip.py")


@dataclass(frozen=True)
class Programs:
    """What is built: programs by the names that documents give them."""

    run: Mapping[str, Sequence[str]]  # target -> what `tools/bazel run` starts
    build: Mapping[str, Sequence[pathlib.Path]]  # target -> its files, for bazel-bin
    path: Mapping[str, str] = field(default_factory=dict)  # name -> script, for the PATH


_STAND_INS = {
    "scp": """
        for last; do :; done
        [ "$last" = b: ] || exit 1
        while [ $# -gt 1 ]; do cp "$1" ../b/; shift; done
    """,
    "curl": f"""
        exec {sys.executable} - "$@" <<'PY'
        import sys, urllib.error, urllib.request
        words, headers, data, url, failing = sys.argv[1:], {{}}, None, "", False
        while words:
            word = words.pop(0)
            if word == "-H":
                name, value = words.pop(0).split(": ")
                headers[name] = value
            elif word == "-d":
                data = words.pop(0).encode()
            elif word == "-sf":
                failing = True
            elif word != "-s":
                url = word
        request = urllib.request.Request(url, data, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            if failing:
                sys.exit(22)
            answer = error
        except OSError as error:
            sys.exit(str(error))
        sys.stdout.write(answer.read().decode())
        PY
    """,
    # We are root where a document says sudo.
    "sudo": """
        if [ "$1" = -u ]; then export PGUSER=$2; shift 2; fi
        exec "$@"
    """,
    "apt-get": """
        [ "$*" = "install -y python3-venv" ] && exec /usr/bin/python3 -c "import venv"
        exit 1
    """,
    "python3": f"""
        [ "$1 $2" = "-m venv" ] || exec /usr/bin/python3 "$@"
        PYTHONPATH= /usr/bin/python3 -m venv --without-pip "$3"
        printf '#!/bin/sh\\nexec {sys.executable} {_PIP} "%s" "$@"\\n' "$3" >"$3/bin/pip"
        chmod 755 "$3/bin/pip"
    """,
}


def _bazel(programs: Programs) -> str:
    lines = ['case "$1 $2" in']
    for target, command in programs.run.items():
        words = " ".join(f'"{word}"' for word in command)
        lines.append(f'"run {target}") shift 2; [ "$1" = -- ] && shift; exec {words} "$@" ;;')
    for target, files in programs.build.items():
        place = "bazel-bin/" + target[2:].partition(":")[0]
        links = "".join(f' && ln -sf "{file}" {place}' for file in files)
        lines.append(f'"build {target}") mkdir -p {place}{links}; exit ;;')
    return "\n".join([*lines, "esac", 'echo "no stand-in for: $*" >&2', "exit 1"])


def exports(worker: pathlib.Path) -> str:
    """A shell's line: what a program of ours wants to run where Bazel has built it."""
    # Folders of packages that are the test's alone lie beside those of the programs' own.
    return f'export MESHNET_WORKER="{worker}" PYTHONPATH="{os.pathsep.join(sys.path)}"'


def installed(meshnet: pathlib.Path, worker: pathlib.Path) -> dict[str, str]:
    """Both commands for the PATH, as an installation has them."""
    return {
        "worker": f'exec "{worker}" "$@"',
        "meshnet": f'{exports(worker)}\nexec "{meshnet}" "$@"',
    }


class Reader:
    """`inside` goes before every command, such as that which enters a namespace."""

    def __init__(
        self,
        folder: pathlib.Path,
        programs: Programs,
        *,
        words: Mapping[str, str],
        environment: Mapping[str, str],
        inside: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._words = words
        self._inside = inside
        self._running: list[asyncio.subprocess.Process] = []
        self.said = ""  # by the last block
        self._count = 0
        self._environment = {
            # What is installed is not to find the test's own modules.
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **environment,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }
        (folder / "bin").mkdir()
        scripts = {**_STAND_INS, **programs.path, "stand_in_bazel": _bazel(programs)}
        for name, script in scripts.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{textwrap.dedent(script)}\n")
            path.chmod(0o755)
        for machine in "ab":
            (folder / machine / "tools").mkdir(parents=True, exist_ok=True)
            bazel = folder / machine / "tools" / "bazel"
            # A work tree may be there already.
            if not bazel.exists():
                bazel.symlink_to(folder / "bin" / "stand_in_bazel")

    def machine(self, name: str) -> pathlib.Path:
        """The folder of machine a or b."""
        return self._folder / name

    def compare(self, block: Block) -> None:
        """Holds what the document shows against what the last block has said."""
        said = _without_numbers(self.said)
        for line in self._here(block.text).splitlines():
            assert _without_numbers(line) in said, f"line {block.line}: {line}\n{self.said}"

    async def do(self, block: Block) -> None:
        """Runs a block; one that goes on is left running once it has said so."""
        if block.alone:
            await self.end()
        for machine in block.machines:
            self.said = await self._do(block, machine)
            for expected in block.says:
                assert expected in self.said, f"line {block.line}:\n{block.text}\n{self.said}"

    async def _do(self, block: Block, machine: str) -> str:
        home = self._folder / machine
        text = self._here(block.text)
        more = {}
        if block.language == "python":
            if "await " in text:
                body = textwrap.indent(text, "    ")
                text = f"import asyncio\nasync def main():\n{body}\nasyncio.run(main())\n"
            command = [sys.executable, "-c", text]
            more = {"PYTHONPATH": os.pathsep.join(sys.path)}
        else:
            exported = self._folder / f"{machine}.exported"
            exported.touch()
            text = f'cd "{home}"\n. "{exported}"\n{text}\ndeclare -px PATH >"{exported}"\n'
            command = ["bash", "-euc", text]
        self._count += 1
        log = self._folder / f"{self._count}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._inside,
                *command,
                cwd=home,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={
                    **self._environment,
                    **more,
                    "HOME": str(home),
                    "BUILD_WORKING_DIRECTORY": str(home),
                    # One machine with the addresses of both cannot tell by which it is reached.
                    **({"MESHNET_SERVE_MESH_LISTEN": "10.0.0.6:0"} if machine == "b" else {}),
                },
            )
        self._running.append(process)
        if block.until:
            async with asyncio.timeout(_READY):
                while block.until not in log.read_text() and process.returncode is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert process.returncode is None, f"line {block.line}:\n{text}\n{log.read_text()}"
        else:
            code = await process.wait()
            assert (code != 0) == block.fails, f"line {block.line}:\n{text}\n{log.read_text()}"
        return log.read_text()

    async def end(self) -> None:
        """Ends what runs on, as Ctrl-C would, and waits until all of it has ended."""
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            await process.wait()
            try:
                async with asyncio.timeout(20):
                    while _lives(process.pid):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
        self._running.clear()

    def _here(self, text: str) -> str:
        """A text of the document with this test's files."""
        for word, here in self._words.items():
            text = text.replace(word, here)
        return text


def _lives(group: int) -> bool:
    """Whether anything of a process group is left: a shell ends before what it has started."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)*", "#", text)
