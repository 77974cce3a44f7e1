import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from meshnet_gguf.text import Utf8Stream


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(), st.lists(st.integers(min_value=0, max_value=10_000)))
@example("a😀b", [2, 3, 4])
def test_valid_text_comes_whole_however_it_is_cut(text: str, cuts: list[int]) -> None:
    stream = Utf8Stream()
    parts = [stream.push(piece) for piece in cut(text.encode(), cuts)]
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts if "\ufffd" not in text)
    assert stream.finish() == ""


@given(st.binary(), st.lists(st.integers(min_value=0, max_value=10_000)))
@example(b"\xf0\x9f\x98", [1, 2])
@example(b"\xe0\x80\x80\xff\xc3", [1, 2, 3, 4])
def test_any_bytes_add_up_to_what_decoding_at_once_gives(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.push(piece) for piece in cut(data, cuts)) + stream.finish()
    assert text == data.decode("utf-8", "replace")


def test_a_split_character_is_held_back_until_it_is_complete() -> None:
    stream = Utf8Stream()
    assert [stream.push(bytes([byte])) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_finish_starts_anew() -> None:
    stream = Utf8Stream()
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(b"a") == "a"
    assert stream.finish() == ""
