"""Runs what a document says, block after block, as a reader would.

It runs in a network of its own, where the addresses of both machines are. What else is in the way
stands here: `tools/bazel run` starts what is built already, scp and curl are scripts that copy
between two folders and ask over HTTP, and after its first run the demo is given a small random
model.
"""

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import sys
import textwrap
import time

from meshnet.testing.postgres import PostgresServer
from meshnet_gguf.models import pinned_models
from meshnet_gguf.provision import provision
from meshnet_gguf.sources import FolderSource

from tests.docs.blocks import Block, blocks_of
from tests.docs.network import enter_network

TEXT = pathlib.Path(os.environ["DOCUMENT"]).read_text()
MODEL = pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()
SMALL_MODEL = pathlib.Path(os.environ["SMALL_MODEL"]).absolute()
PROGRAMS = {
    name: pathlib.Path(os.environ[variable]).absolute()
    for name, variable in (("meshnet", "MESHNET"), ("demo", "DEMO"), ("worker", "MESHNET_WORKER"))
}
# Before anything starts a thread.
enter_network("10.0.0.5", "10.0.0.6")

END = 800.0
READY = 120.0

# Each takes what the documents give it, and no more.
STAND_INS = {
    "bazel": """
        case "$1 $2" in
        "run //:meshnet") shift 2; [ "$1" = -- ] && shift; exec meshnet "$@" ;;
        "run //:demo") shift 2; [ "$1" = -- ] && shift; exec demo "$@" ;;
        "build //cc/worker") exit 0 ;;
        esac
        echo "no stand-in for: $*" >&2; exit 1
    """,
    "scp": """
        for last; do :; done
        [ "$last" = b: ] || exit 1
        while [ $# -gt 1 ]; do cp "$1" ../b/; shift; done
    """,
    "curl": f"""
        exec {sys.executable} - "$@" <<'PY'
        import sys, urllib.error, urllib.request
        words, headers, data, url = sys.argv[1:], {{}}, None, ""
        while words:
            word = words.pop(0)
            if word == "-H":
                name, value = words.pop(0).split(": ")
                headers[name] = value
            elif word == "-d":
                data = words.pop(0).encode()
            elif word != "-s":
                url = word
        request = urllib.request.Request(url, data, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        sys.stdout.write(answer.read().decode())
        PY
    """,
}


class Reader:
    """Somebody who reads a document and does what it says, with a folder for each machine."""

    def __init__(self, folder: pathlib.Path, database: str) -> None:
        self._folder = folder
        self._words = {
            "postgresql://meshnet@db.example/meshnet": database,
            "MODEL.gguf": str(MODEL),
            "model.gguf": str(MODEL),
        }
        self._running: list[asyncio.subprocess.Process] = []
        self._said = ""
        for machine in ("a", "b", "bin"):
            (folder / machine / "tools").mkdir(parents=True)
        self._install()

    def _install(self) -> None:
        scripts = {
            "worker": f'exec "{PROGRAMS["worker"]}" "$@"',
            "demo": f"""
                case " $*" in
                *" --model "* | *" --stages "*) set -- "$@" --model "{SMALL_MODEL}" ;;
                esac
                exec "{PROGRAMS["demo"]}" "$@"
            """,
            # One machine with the addresses of both cannot tell by which it is reached.
            "meshnet": f"""
                case "${{PWD##*/}} $*" in
                "b serve --join "*) set -- "$@" --mesh-listen=10.0.0.6:0 ;;
                esac
                exec "{PROGRAMS["meshnet"]}" "$@"
            """,
        }
        for name, script in {**STAND_INS, **scripts}.items():
            text = textwrap.dedent(script)
            path = self._folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        for machine in ("a", "b"):
            (self._folder / machine / "tools" / "bazel").symlink_to(self._folder / "bin" / "bazel")

    def _here(self, text: str) -> str:
        """A text of the document with this test's files."""
        for word, here in self._words.items():
            text = text.replace(word, here)
        return text

    def compare(self, block: Block) -> None:
        """Holds what the document shows against what the last block has said."""
        said = _without_numbers(self._said)
        for line in self._here(block.text).splitlines():
            assert _without_numbers(line) in said, f"line {block.line}: {line}\n{self._said}"

    async def do(self, block: Block) -> None:
        """Runs a block; one that goes on is left running once it has said so."""
        text = self._here(block.text)
        if "await " in text and block.language == "python":
            body = "".join(f"    {line}\n" for line in text.splitlines())
            text = f"import asyncio\nasync def main():\n{body}\nasyncio.run(main())\n"
        shell = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euc"]
        log = self._folder / f"{block.line}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *shell,
                text,
                cwd=self._folder / block.machine,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PATH": f"{self._folder}/bin:{os.environ['PATH']}",
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    # Otherwise every one of these programs compiles its modules anew.
                    "PYTHONPYCACHEPREFIX": str(self._folder / "compiled"),
                    "MESHNET_STORAGE": str(self._folder / "storage"),
                    "MESHNET_WORKER": str(PROGRAMS["worker"]),
                    "BUILD_WORKING_DIRECTORY": str(self._folder / block.machine),
                },
            )
        self._running.append(process)
        if block.until:
            async with asyncio.timeout(READY):
                while block.until not in log.read_text() and process.returncode is None:
                    await asyncio.sleep(0.02)
            assert process.returncode is None, log.read_text()
        else:
            assert await process.wait() == 0, f"line {block.line}:\n{text}\n{log.read_text()}"
        self._said = log.read_text()
        for expected in block.says:
            assert expected in self._said, f"line {block.line}:\n{text}\n{self._said}"

    async def end(self) -> None:
        """Ends what runs on, as Ctrl-C would."""
        for process in reversed(self._running):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)*", "#", text)


async def provide(storage: pathlib.Path) -> None:
    """Puts the pinned model where the commands look for it, so that none has to fetch it."""
    manifest = pinned_models()["smollm2"].manifest
    [file] = manifest.files
    (storage / "from").mkdir(parents=True)
    (storage / "from" / file.name).symlink_to(MODEL)
    await provision(manifest, [FolderSource(storage / "from")], storage / "models")


async def test_all_that_the_document_says(tmp_path: pathlib.Path) -> None:
    blocks = list(blocks_of(TEXT))
    await provide(tmp_path / "storage")
    with contextlib.ExitStack() as servers:
        database = ""
        if "postgresql://" in TEXT:
            database = servers.enter_context(PostgresServer.start()).url("meshnet")
        reader = Reader(tmp_path, database)
        try:
            async with asyncio.timeout(END):
                for block in blocks:
                    if block.treatment == "run":
                        started = time.monotonic()
                        await reader.do(block)
                        print(f"line {block.line}: {time.monotonic() - started:.1f} s")
                    elif block.treatment == "output":
                        reader.compare(block)
        finally:
            await reader.end()
