"""Messages of clients, typed and versioned: JSON objects with a ``type``, checked here and nowhere else."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from flashdreams.core.controls import Control, ControlError, control_from_json

VERSION = 1
SUBPROTOCOL = "flashdreams.v1"
MAX_SEED = 2**64 - 1
"""As in :mod:`flashdreams.core.noise`, which needs torch."""
MAX_PROMPT = 20_000
"""Characters, as on the command line."""
MAX_SIZE = 8192
MAX_OFFER = 65_536
"""Characters; a browser's has 6,000."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,19}")


class ProtocolError(ValueError):
    """A message that cannot be used; ``code`` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_seed(value: Any) -> int:
    """A seed as JSON has it: a whole number, or the same as text, which JavaScript needs above 2**53.

    Raises:
        ValueError: it is neither, or outside the range.
    """
    whole = value
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        whole = int(value)
    if isinstance(whole, bool) or not isinstance(whole, int) or not 0 <= whole <= MAX_SEED:
        raise ValueError(f"seed is {value!r:.40}; expected a whole number from 0 to {MAX_SEED}, as digits alone")
    return whole


def _parse_control(value: Any) -> Control | str | None:
    """A control, or a word, the names of keys or a number as text, which is read as on the command line."""
    if value is None or (isinstance(value, str) and len(value) <= 200):
        return value
    return control_from_json(value)


def _text(value: Any) -> Any:
    """Text that can be written again: half a surrogate pair cannot."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("the text holds half a character (a lone surrogate)") from None
    return value


Seed = Annotated[int, BeforeValidator(parse_seed, json_schema_input_type=int | str)]
ControlField = Annotated[Any, BeforeValidator(_parse_control)]
Prompt = Annotated[str, Field(max_length=MAX_PROMPT), BeforeValidator(_text)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]


class Message(BaseModel):
    """What all messages share: nothing unknown is accepted, and nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class SceneFields(Message):
    """What a rollout begins with."""

    prompt: Prompt = ""
    negative_prompt: Prompt | None = None
    seed: Seed | None = None
    """Drawn at random if not given, and told."""
    height: Size | None = None
    width: Size | None = None
    image: Name | None = None
    """First frame: what ``POST /v1/images`` answered."""
    controls: Annotated[list[ControlField], Field(max_length=100_000)] = []
    """One control per frame from the first on; live controls count from where they end."""


class View(Message):
    """How a connection wants its pictures."""

    encoding: Literal["raw", "jpeg", "webp", "png"] = "jpeg"
    quality: Annotated[int, Field(ge=1, le=100)] = 90


class Create(SceneFields, View):
    """Begin a session: the first message of a connection."""

    type: Literal["create"]
    v: Literal[1]
    delivery: Literal["live", "all"] = "live"
    """``live``: at the speed of the video, and the newest first where a client is slow. ``all``: as fast as it takes
    them, every frame."""
    num_chunk: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Ends by itself after so many chunks."""
    record: bool = False
    """Keep a video of the session, to be downloaded."""
    paused: bool = False


class Attach(View):
    """Go on with a session whose connection broke: the first message of a connection."""

    type: Literal["attach"]
    v: Literal[1]
    session: Name


class SetControl(Message):
    """Hold a control from the next chunk on."""

    type: Literal["control"]
    control: ControlField


class SetPrompt(Message):
    """Show another prompt from the next chunk on."""

    type: Literal["prompt"]
    prompt: Prompt
    negative_prompt: Prompt | None = None
    policy: Literal["keep", "recache", "reset"] | None = None


class Pause(Message):
    """Make no more chunks until ``resume``."""

    type: Literal["pause"]


class Resume(Message):
    """Go on after ``pause``."""

    type: Literal["resume"]


class Reset(Message):
    """Begin anew with the present prompt; with another seed if one is given."""

    type: Literal["reset"]
    seed: Seed | None = None


class SetSeed(Message):
    """Begin anew with this seed."""

    type: Literal["seed"]
    seed: Seed


class Snapshot(Message):
    """Keep the state at the next chunk boundary; answered with its name."""

    type: Literal["snapshot"]


class Restore(Message):
    """Go on from a state that was kept."""

    type: Literal["restore"]
    snapshot: Name


class Close(Message):
    """End the session."""

    type: Literal["close"]


class Ping(Message):
    """Answered with ``pong`` and the same ``t``."""

    type: Literal["ping"]
    t: Annotated[float, Field(allow_inf_nan=False, strict=False)] = 0.0


class WebRTCOffer(Message):
    """Connect a peer for video and messages; answered with ``webrtc_answer``."""

    type: Literal["webrtc_offer"]
    sdp: Annotated[str, Field(max_length=MAX_OFFER)]


class ChooseVideo(Message):
    """Which way pictures come from the next chunk on."""

    type: Literal["video"]
    over: Literal["webrtc", "websocket"]


First = Annotated[Create | Attach, Field(discriminator="type")]
Later = Annotated[
    SetControl
    | SetPrompt
    | Pause
    | Resume
    | Reset
    | SetSeed
    | Snapshot
    | Restore
    | Close
    | Ping
    | WebRTCOffer
    | ChooseVideo,
    Field(discriminator="type"),
]
_FIRST: TypeAdapter[Create | Attach] = TypeAdapter(First)
_LATER: TypeAdapter[Any] = TypeAdapter(Later)


def parse_first(text: str) -> Create | Attach:
    """The first message of a connection.

    Raises:
        ProtocolError: with what is wrong with it.
    """
    return _parse(_FIRST, text)


def parse_later(text: str) -> Any:
    """Any further message; errors as in :func:`parse_first`."""
    return _parse(_LATER, text)


def _parse(adapter: TypeAdapter[Any], text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed", f"the message is not JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise ProtocolError("malformed", f"the message is {value!r:.40}; expected an object with a type")
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ProtocolError("invalid", describe(error)) from None
    except (ControlError, RecursionError) as error:
        raise ProtocolError("invalid", f"{error!s:.300}") from None


def describe(error: ValidationError) -> str:
    """The first problem that a validation found, as a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:80]
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}"[:400] if where else message[:400]


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no finite number")
