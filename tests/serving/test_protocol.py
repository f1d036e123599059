"""Messages: what is understood, what is refused and how it is said; nothing else can come of any bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.core import noise
from flashdreams.infra import runner
from flashdreams.serving import pictures, protocol, wire
from flashdreams.serving.protocol import ProtocolError, parse_first, parse_later, parse_seed
from flashdreams.serving.wire import FrameHeader, WireError
from serving import junk

pytestmark = pytest.mark.ci_cpu
CREATE = {"type": "create", "v": 1, "prompt": "a ball"}


def create(**fields: Any) -> Any:
    return parse_first(json.dumps(CREATE | fields))


def test_limits_are_those_of_the_runtime() -> None:
    assert protocol.MAX_SEED == noise.MAX_SEED
    assert protocol.MAX_PROMPT == runner.MAX_PROMPT


@pytest.mark.parametrize("text", ["0", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
                                  "17982163893102248868", "18446744073709551615"])  # fmt: skip
def test_seeds_come_through_exactly(text: str) -> None:
    """B10: as a number and as text, which is what a page sends."""
    assert create(seed=int(text)).seed == create(seed=text).seed == int(text)


@pytest.mark.parametrize("seed", ["-1", "18446744073709551616", "1e3", "0x10", "007", " 7", "", "None", "９", -1, 2**64,
                                  1e3, 7.0, True, [], {}])  # fmt: skip
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(ProtocolError, match="whole number from 0 to 18446744073709551615") as refused:
        create(seed=seed)
    assert refused.value.code == "invalid"
    with pytest.raises(ValueError):
        parse_seed(seed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"type": "create", "v": 1, "seed": NaN}', "no finite number"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "x"}', "type"),
        ('{"type": "create", "v": 2, "prompt": "x"}', "v: Input should be 1"),
        ('{"type": "create", "v": 1, "promt": "x"}', "promt"),
        ('{"type": "create", "v": 1, "prompt": 7}', "prompt"),
        ('{"type": "create", "v": 1, "prompt": "\\ud800"}', "surrogate"),
        ('{"type": "create", "v": 1, "height": 1000000}', "height"),
        ('{"type": "create", "v": 1, "image": "../../etc/passwd"}', "image"),
        ('{"type": "create", "v": 1, "controls": [{"keys": 7}]}', "keys"),
    ],
)
def test_a_message_that_cannot_be_used_says_why(text: str, says: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_first(text)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 500


def test_controls_are_those_of_recordings() -> None:
    message = parse_later('{"type": "control", "control": {"keys": ["ArrowLeft", "w"]}}')
    assert message.control.keys.held == ("left", "w")
    assert parse_later('{"type": "control", "control": "left"}').control == "left"


@pytest.mark.parametrize("parse", [parse_first, parse_later])
def test_a_thousand_messages_of_junk(parse: Any) -> None:
    random_ = random.Random(0)
    outcomes = set()
    for _ in range(1000):
        try:
            parse(junk(random_))
            outcomes.add("used")
        except ProtocolError as error:
            outcomes.add(error.code)
    assert outcomes <= {"used", "malformed", "invalid"}
    assert {"malformed", "invalid"} <= outcomes


@given(st.binary(max_size=100))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    for message in (data, wire.MAGIC + bytes([1]) + data):
        try:
            header, body = wire.unpack(message)
        except WireError:
            continue
        assert header.pack() + bytes(body) == message


@pytest.mark.parametrize("encoding", wire.ENCODINGS)
def test_a_picture_comes_through(encoding: str) -> None:
    rows, columns = np.mgrid[:24, :40]
    frame = np.stack([rows * 10, columns * 6, rows + columns], -1).astype(np.uint8)
    header = FrameHeader(encoding, 7, 2, 2**32 - 1, 12, 0.75, 24, 40)
    told, body = wire.unpack(header.pack() + pictures.encode(frame, encoding, 95))
    assert told == header
    off = np.abs(pictures.decode(told, body).astype(int) - frame)
    assert off.max() == 0 if encoding in ("raw", "png") else off.mean() < 3


def test_the_cases_of_seeds_are_all_tried() -> None:
    """The list of B10, line by line: refused or exact."""
    for line in (Path(__file__).parents[1] / "cases/B10/seed_values.txt").read_text().splitlines():
        try:
            assert str(parse_seed(line)) == line
        except ValueError:
            assert not line.isdecimal() or line != str(int(line)) or int(line) >= 2**64
