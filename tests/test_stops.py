import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.stops import StopStrings


def run(stops, pieces, *, include=False, from_piece=0):
    """Feed pieces; return what came out of each, the rest, and the stop string."""
    text = StopStrings(stops, include=include)
    out = [text.push(p, may_stop=i >= from_piece) for i, p in enumerate(pieces)]
    return out, text.finish(), text.found


def test_the_text_ends_before_the_stop_string():
    assert run(["STOP"], ["Hi S", "TO", "P there"]) == (["Hi ", "", ""], "", "STOP")
    assert run(["STOP"], ["Hi S", "TOP!", "x"], include=True) == (
        ["Hi ", "STOP", ""],
        "",
        "STOP",
    )


def test_what_only_began_like_one_comes_later():
    assert run(["STOP"], ["a STO", "NE"]) == (["a ", "STONE"], "", None)
    assert run(["STOP"], ["a STO"]) == (["a "], "STO", None)
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "", "aab")


def test_without_stop_strings_nothing_is_held():
    assert run([], ["S", ""]) == (["S", ""], "", None)


@pytest.mark.parametrize(
    ("stops", "text", "found", "left"),
    [
        (["b", "ab"], "xab", "ab", "x"),  # complete together: the longest
        (["abc", "b"], "xabc", "b", "xa"),  # the first to be complete
        (["é\n", "\n\n"], "né\n\n", "é\n", "n"),
        (["👍"], "ok👍!", "👍", "ok"),
    ],
)
def test_overlapping_ones(stops, text, found, left):
    for pieces in ([text], list(text)):
        out, rest, stop = run(stops, pieces)
        assert ("".join(out) + rest, stop) == (left, found)


def test_not_before_it_may():
    # "ab" in the first piece is let through; the one that ends later counts.
    assert run(["ab"], ["abab", "xab"], from_piece=1) == (["abab", "x"], "", "ab")
    assert run(["aa"], ["aa", "a"], from_piece=1) == (["a", ""], "", "aa")


def first_stop(text, stops):
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abé", max_size=5), max_size=8),
)
def test_pieces_do_not_matter(stops, pieces):
    left, stop = first_stop("".join(pieces), stops)
    out, rest, found = run(stops, pieces)
    assert ("".join(out) + rest, found) == (left, stop)
    # Nothing was shown that is not part of the answer.
    for i in range(len(out)):
        assert left.startswith("".join(out[: i + 1]))
    with_stop = run(stops, pieces, include=True)
    assert "".join(with_stop[0]) + with_stop[1] == left + (stop or "")
