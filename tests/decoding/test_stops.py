import pytest

from peerllm.decoding.stops import StopScanner


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ((), ["a", "b"], "ab"),
        (("END",), ["one E", "ND two"], "one "),
        (("END",), ["one E", "N", "Q two"], "one ENQ two"),
        (("aab",), ["aaa", "ab x"], "aa"),
        (("xyz", "yq"), ["x", "y", "q"], "x"),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb"),
        (("b", "ab"), ["ab"], ""),
        (("",), ["text"], "text"),
    ],
)
def test_text_is_shown_up_to_the_first_stop_string_however_it_is_cut(
    stops: tuple[str, ...], pieces: list[str], shown: str
) -> None:
    for cut in (pieces, list("".join(pieces))):
        scanner = StopScanner(stops)
        got = "".join(scanner.push(piece) for piece in cut)
        if not scanner.is_stopped:
            got += scanner.finish()
        assert got == shown


def test_what_could_begin_a_stop_string_is_held_back_and_nothing_else_is() -> None:
    scanner = StopScanner(("END",))
    assert scanner.push("all of this E") == "all of this "
    assert scanner.push("x") == "Ex"
    assert scanner.push("EN") == ""
    assert scanner.finish() == "EN"


def test_after_a_stop_string_nothing_more_is_shown() -> None:
    scanner = StopScanner(("END",))
    assert scanner.push("a END b") == "a "
    assert scanner.is_stopped
    assert scanner.push("c") == ""
    assert scanner.finish() == ""
