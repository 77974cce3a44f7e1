"""Runs what documents say of llama.cpp's source: fetched, patched, changed, proved.

The source is the one that the build has fetched, without its patches; the editor of whoever changes
the stack changes nothing. So the patches come out of it as they went in.
"""

import os
import pathlib
import shutil

from tests.docs.blocks import blocks_of
from tests.docs.reader import Programs, Reader
from third_party.llama_cpp.llama_source import manifest, patch_stack

DOCUMENTS = [pathlib.Path(path) for path in os.environ["DOCUMENTS"].split()]
PIN = pathlib.Path("third_party/llama_cpp")
STACK = pathlib.Path("patches/llama_cpp")
PATCHES = {path.name: path.read_bytes() for path in STACK.iterdir()}
PATCHED = pathlib.Path(os.environ["LLAMA_CPP_LICENSE"]).resolve().parent


async def test_all_that_the_documents_say(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(PATCHED, source)
    patch_stack.reverse_in_folder(manifest.load(PIN), patch_stack.load(STACK), source)
    reader = Reader(
        tmp_path,
        Programs(run={}, build={}),
        words={},
        environment={
            "MESHNET_LLAMA_CPP_SOURCE": str(source),
            "MESHNET_CACHE": str(tmp_path / "cache"),
            "GIT_SEQUENCE_EDITOR": "true",
            **{f"GIT_{who}_NAME": "Ada Lovelace" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
        },
    )
    here = reader.machine("a")
    for folder in (PIN / "llama_source", STACK):
        shutil.copytree(folder, here / folder, ignore=shutil.ignore_patterns("tests"))
    for file in ("manifest.json", "pinned_tree.txt"):
        shutil.copy(PIN / file, here / PIN)
    shutil.copy("tools/llama_cpp", here / "tools")
    ran = 0
    for document in DOCUMENTS:
        for block in blocks_of(document.read_text()):
            if block.treatment == "run":
                await reader.do(block)
                ran += 1
    assert ran >= len(DOCUMENTS)
    for name, content in PATCHES.items():
        assert (here / STACK / name).read_bytes() == content, name
