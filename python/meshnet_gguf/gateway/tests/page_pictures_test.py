"""What docs/status.md says of the pictures: they are taken, of a real browser's page."""

import os
import pathlib
import struct
import subprocess
import zlib

from tests.docs.blocks import as_built, blocks_for_this_test, commands_of

PICTURES = os.environ["PICTURES"]
[BLOCK] = blocks_for_this_test(pathlib.Path(os.environ["DOCUMENT"]).read_text())
[COMMAND] = commands_of(BLOCK.text)
# Name -> its window, in pixels: a picture shows the whole page, which is no smaller.
WINDOWS = {"phone": (390, 844), "narrow": (320, 640), "tablet": (820, 1100), "wide": (1440, 900)}
PAGES = [f"{size}-{scheme}" for size in WINDOWS for scheme in ("light", "dark")]
EXPECTED = {*PAGES, *(f"{page}-killed" for page in PAGES), "phone-dark-long", "wide-light-long"}


def read_picture(content: bytes) -> tuple[int, int, bytes]:
    """Width, height and the filtered bytes of a PNG of 8-bit RGB or RGBA, all of it checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, header, packed = 8, b"", b""
    while at < len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        data = content[at + 8 : at + 8 + size]
        [checksum] = struct.unpack_from(">I", content, at + 8 + size)
        assert zlib.crc32(kind + data) == checksum
        header = data if kind == b"IHDR" else header
        packed += data if kind == b"IDAT" else b""
        at += 12 + size
    assert kind == b"IEND"
    width, height, depth, colours = struct.unpack_from(">IIBB", header)
    assert depth == 8
    pixels = zlib.decompress(packed)
    assert len(pixels) == height * (1 + width * {2: 3, 6: 4}[colours])
    return width, height, pixels


def test_every_picture_is_taken(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "pictures"
    words = [str(folder) if word == "FOLDER" else word for word in COMMAND]
    target = "//python/meshnet_gguf/gateway/tests:page_pictures"
    done = subprocess.run(
        as_built(words, target, [PICTURES]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    taken = {path.stem: path.read_bytes() for path in folder.iterdir()}
    assert set(taken) == EXPECTED
    assert set(done.stdout.split()) == {f"{folder / name}.png" for name in EXPECTED}
    for name, content in taken.items():
        width, height, pixels = read_picture(content)
        window = WINDOWS[name.split("-")[0]]
        assert width == window[0], name
        assert height >= window[1], name
        # Text and boxes of many shades, and no empty page.
        assert len(set(pixels)) > 50, name
    # Each shows something else than the others.
    assert len(set(taken.values())) == len(EXPECTED)


def test_without_a_folder_it_says_how_it_is_called() -> None:
    done = subprocess.run([PICTURES], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert " ".join(COMMAND) in done.stderr
