"""A notice is said once, on stderr."""

from __future__ import annotations

import pytest

from flashdreams.core.notices import reset, say_once

pytestmark = pytest.mark.ci_cpu


def test_a_notice_is_said_the_first_time_only(capsys):
    say_once("size 100x100 -> 96x96")
    say_once("size 100x100 -> 96x96")
    say_once("another")
    said = capsys.readouterr()
    assert said.err == "size 100x100 -> 96x96\nanother\n"
    assert said.out == ""


def test_after_a_reset_it_is_said_again(capsys):
    say_once("x")
    reset()
    say_once("x")
    assert capsys.readouterr().err == "x\nx\n"
