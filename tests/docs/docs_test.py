"""Runs what our documents say, block after block, as a reader would.

What is in the way of that stands here: addresses of two machines are loopback addresses that no
other test has, `tools/bazel run` starts what is built already, and scp and curl are scripts that
copy between two folders and ask over HTTP.
"""

import asyncio
import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator

from meshnet.testing.postgres import PostgresServer
from meshnet_gguf.models import pinned_models
from meshnet_gguf.provision import provision
from meshnet_gguf.sources import FolderSource

from tests.docs.blocks import Block, blocks_of

DOCUMENTS = {path.name: path for path in map(pathlib.Path, os.environ["DOCUMENTS"].split())}
MODEL = pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()
PROGRAMS = {
    name: pathlib.Path(os.environ[variable]).absolute()
    for name, variable in (("meshnet", "MESHNET"), ("demo", "DEMO"), ("worker", "MESHNET_WORKER"))
}
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
        net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
        self._words = {
            "10.0.0.5": f"{net}.5",
            "10.0.0.6": f"{net}.6",
            "127.0.0.1:": f"{net}.1:",
            "postgresql://meshnet@db.example/meshnet": database,
            "MODEL.gguf": str(MODEL),
            "model.gguf": str(MODEL),
        }
        self._running: list[asyncio.subprocess.Process] = []
        self.said: dict[int, str] = {}
        for machine in ("a", "b", "bin"):
            (folder / machine / "tools").mkdir(parents=True)
        self._install(net)

    def _install(self, net: str) -> None:
        scripts = {
            name: f'exec "{path}" "$@"' for name, path in PROGRAMS.items() if name != "meshnet"
        }
        # Where nothing is said it would listen where other tests do.
        scripts["meshnet"] = f"""
            if [ "$1" = serve ]; then
                case " $* " in
                *" --join "*) [ "${{PWD##*/}}" = b ] && set -- "$@" --mesh-listen={net}.6:0 ;;
                *) set -- "$@" --listen={net}.1:8080
                   case " $* " in
                   *" --mesh-listen "*) ;;
                   *) set -- "$@" --mesh-listen={net}.1:7100 ;;
                   esac ;;
                esac
            fi
            if [ "$1" = chat ]; then set -- "$@" --url=http://{net}.1:8080/v1; fi
            exec "{PROGRAMS["meshnet"]}" "$@"
        """
        for name, script in {**STAND_INS, **scripts}.items():
            lines = script.split("\n")
            text = "\n".join(line.removeprefix("        ") for line in lines)
            path = self._folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        for machine in ("a", "b"):
            (self._folder / machine / "tools" / "bazel").symlink_to(self._folder / "bin" / "bazel")

    async def do(self, block: Block) -> None:
        """Runs a block; one that goes on is left running once it has said so."""
        text = block.text
        for word, here in self._words.items():
            text = text.replace(word, here)
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
        self.said[block.line] = log.read_text()

    async def end(self) -> None:
        """Ends what runs on, as Ctrl-C would."""
        for process in reversed(self._running):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                try:
                    async with asyncio.timeout(10):
                        await process.wait()
                except TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()


async def provide(storage: pathlib.Path) -> None:
    """Puts the pinned model where the commands look for it, so that none has to fetch it."""
    manifest = pinned_models()["smollm2"].manifest
    [file] = manifest.files
    (storage / "from").mkdir(parents=True)
    shutil.copyfile(MODEL, storage / "from" / file.name)
    await provision(manifest, [FolderSource(storage / "from")], storage / "models")


@contextlib.asynccontextmanager
async def follow(name: str, folder: pathlib.Path, database: str = "") -> AsyncIterator[Reader]:
    """Does all that a document says; what goes on ends with the block."""
    reader = Reader(folder, database)
    try:
        async with asyncio.timeout(END):
            for block in blocks_of(DOCUMENTS[name].read_text()):
                if block.treatment == "run":
                    await reader.do(block)
        yield reader
    finally:
        await reader.end()


async def test_the_readme(tmp_path: pathlib.Path) -> None:
    await provide(tmp_path / "storage")
    async with follow("README.md", tmp_path) as reader:
        assert any("parity: identical" in text for text in reader.said.values())


async def test_the_tutorial(tmp_path: pathlib.Path) -> None:
    await provide(tmp_path / "storage")
    async with follow("tutorial.md", tmp_path) as reader:
        said = list(reader.said.values())
    assert any("layers [20, 30) are missing" in text for text in said)
    assert any("NO_ROUTE" in text for text in said)
    assert any("serves layers [20, 30)" in text for text in said)
    assert any('"object": "chat.completion"' in text and "sky" in text for text in said)
    assert any('"models"' in text for text in said)


async def test_operations(tmp_path: pathlib.Path) -> None:
    with PostgresServer.start() as database:
        async with follow("operations.md", tmp_path, database.url("meshnet")) as reader:
            assert sum("listening" in text for text in reader.said.values()) == 2


def test_no_other_document_wants_to_be_run() -> None:
    found = {
        name
        for name, path in DOCUMENTS.items()
        if any(block.treatment == "run" for block in blocks_of(path.read_text()))
    }
    assert found == {"README.md", "tutorial.md", "operations.md"}
