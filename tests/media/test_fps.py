"""Frame rates are exact fractions from text to file (case B05)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import MAX_FPS, MIN_FPS, parse_fps

pytestmark = pytest.mark.ci_cpu


def test_the_cases_are_sorted_into_valid_and_invalid(cases):
    valid, invalid = {}, {}
    for text in (cases / "B05" / "fps_values.txt").read_text().split():
        try:
            valid[text] = parse_fps(text)
        except MediaError as error:
            invalid[text] = str(error)
    assert list(invalid) == ["0", "-1", "nan", "inf", "1e9", "abc"]
    assert all(repr(text) in message and "0.1 to 1000" in message for text, message in invalid.items())
    assert valid == {
        "23.976": Fraction(2997, 125),
        "29.97": Fraction(2997, 100),
        "59.94": Fraction(2997, 50),
        "30000/1001": Fraction(30000, 1001),
        "72.004": Fraction(18001, 250),
        "12.5": Fraction(25, 2),
        "0.5": Fraction(1, 2),
        "1": Fraction(1),
        "240": Fraction(240),
    }


@given(st.decimals("0.1", "1000", places=6))
def test_a_decimal_of_six_places_is_taken_at_its_word(value):
    assert parse_fps(f"{value:f}") == Fraction(value)


@given(st.fractions(MIN_FPS, MAX_FPS, max_denominator=10**6))
def test_a_parsed_rate_parses_to_itself(rate):
    assert parse_fps(str(rate)) == rate == parse_fps(rate)


@pytest.mark.parametrize("text", ["24/1.001", " 24000 / 1001 "])
def test_spellings_of_ntsc_film(text):
    assert parse_fps(text) == Fraction(24000, 1001)


def test_digits_beyond_what_a_file_holds_are_rounded_and_said_once(capsys):
    assert parse_fps(30000 / 1001) == Fraction(30000, 1001)
    assert parse_fps(30000 / 1001) == Fraction(30000, 1001)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(30000 / 1001) in said and "30000/1001" in said


@pytest.mark.parametrize(
    "value", ["", "1/0", "0/1", "1e999999999", "24fps", "--5", "0.05", "1000.1", "1/2/3", True, None]
)
def test_neighbours_of_the_bad_values_are_refused_too(value):
    with pytest.raises(MediaError, match="fps is"):
        parse_fps(value)
