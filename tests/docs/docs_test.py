"""Runs what documents say, block after block, as a reader would.

It runs in a network of its own, where the addresses of both machines are; what else is in the way
of a reader, reader.py says. After its first run the demo is given a small random model.
"""

import asyncio
import os
import pathlib
import sys
import time

from meshnet_gguf.testing.pinned_storage import provide_model

from tests.docs.blocks import blocks_of
from tests.docs.network import enter_network
from tests.docs.reader import Programs, Reader, exports, installed

DOCUMENTS = [pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()]
MODEL = pathlib.Path(os.environ["MESHNET_TEST_MODEL"]).absolute()
SMALL_MODEL = pathlib.Path(os.environ["SMALL_MODEL"]).absolute()
MESHNET, DEMO, WORKER, PUBLISH = (
    pathlib.Path(os.environ[name]).absolute() for name in ("MESHNET", "DEMO", "WORKER", "PUBLISH")
)
SMOKE = pathlib.Path("tools/release_smoke").absolute()
VERSION = os.environ["VERSION"]
# For this machine's CPU; another's may lie beside it.
FILES = [path for path in os.environ["RELEASE"].split() if "aarch64" not in path]
RELEASE = [pathlib.Path(path).absolute() for path in FILES]
# Before anything starts a thread.
enter_network("10.0.0.5", "10.0.0.6")

END = 800.0


def programs(folder: pathlib.Path) -> Programs:
    return Programs(
        run={
            "//:demo": ["demo"],
            "//:meshnet": ["meshnet"],
            "//release:publish": [
                *(str(PUBLISH), "--version", VERSION, "--artifacts", *map(str, RELEASE)),
            ],
        },
        build={"//cc/worker": [WORKER], "//release:all": RELEASE},
        path={
            **installed(MESHNET, WORKER),
            "demo": f"""
                {exports(WORKER)}
                case " $* " in
                *" --fixture "*) ;;
                *) [ -e "{folder}/demonstrated" ] && set -- "$@" --model "{SMALL_MODEL}" ;;
                esac
                touch "{folder}/demonstrated"
                exec "{DEMO}" "$@"
            """,
        },
    )


async def test_all_that_the_documents_say(tmp_path: pathlib.Path) -> None:
    await provide_model(tmp_path / "storage", "smollm2", MODEL)
    reader = Reader(
        tmp_path,
        programs(tmp_path),
        words={"MODEL.gguf": str(MODEL), "model.gguf": str(MODEL)},
        environment={
            # Nobody looks at the figures.
            "MESHNET_BENCH_REPEATS": "1",
            "MESHNET_STORAGE": str(tmp_path / "storage"),
            "SITE_PACKAGES": os.pathsep.join(p for p in sys.path if p.endswith("/site")),
        },
    )
    # What a reader has been told to copy, or has at hand.
    (reader.machine("a") / "tools" / SMOKE.name).symlink_to(SMOKE)
    if not any("//release:publish" in document.read_text() for document in DOCUMENTS):
        for machine in "ab":
            for file in RELEASE:
                (reader.machine(machine) / file.name).symlink_to(file)
    (reader.machine("a") / "models").mkdir()
    (reader.machine("a") / "models" / "llama.gguf").symlink_to(MODEL)
    try:
        async with asyncio.timeout(END):
            for document in DOCUMENTS:
                for block in blocks_of(document.read_text()):
                    if block.treatment == "run":
                        started = time.monotonic()
                        await reader.do(block)
                        taken = time.monotonic() - started
                        print(f"{document.name}:{block.line}: {taken:.1f} s")
                    elif block.treatment == "output":
                        reader.compare(block)
    finally:
        await reader.end()
