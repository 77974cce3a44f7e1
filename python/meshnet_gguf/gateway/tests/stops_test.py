import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from meshnet_gguf.gateway._stops import StopFilter

WORDS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    held = StopFilter(stops)
    shown = []
    for piece in pieces:
        text, stopped = held.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    shown.append(held.finish())
    return shown, False


@given(WORDS, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("ababb", ["abb"], [1, 2, 3, 4])
def test_a_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    shown, stopped = run([text[a:b] for a, b in itertools.pairwise(edges)], stops)
    # With several stop strings the one that is complete first ends the text.
    ends = [
        (text.find(stop) + len(stop), text.find(stop)) for stop in stops if text.find(stop) >= 0
    ]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(shown) == text
    else:
        whole = "".join(shown)
        assert text.startswith(whole)
        assert not any(stop in whole for stop in stops)
        assert len(whole) in {begin for _, begin in ends}


def test_nothing_of_a_stop_string_is_shown() -> None:
    held = StopFilter(["\nUser:", "END"])
    assert held.push("Hello\nUs") == ("Hello", False)
    assert held.push("ers\nE") == ("\nUsers\n", False)
    assert held.push("N") == ("", False)
    assert held.push("D of it") == ("", True)
    assert held.push("more") == ("", True)
    assert held.finish() == ""


def test_what_was_held_back_in_vain_comes_at_the_end() -> None:
    held = StopFilter(["STOP"])
    assert held.push("ST") == ("", False)
    assert held.finish() == "ST"
