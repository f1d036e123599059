"""What is said between a client and a server, without any waiting: both kinds of sessions are made of this."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from flashdreams.core.controls import Control, control_to_json
from flashdreams.serving.pictures import decode
from flashdreams.serving.protocol import SUBPROTOCOL, VERSION
from flashdreams.serving.recording import SessionWriter
from flashdreams.serving.security import BEARER, encode_token
from flashdreams.serving.wire import unpack

MAX_MESSAGE = 2**26
"""Bytes of a frame that are accepted."""
MAX_WAITING = 256
"""Messages that wait to be taken; a client that takes none for longer holds the server up, which lets it go."""


class ServerError(Exception):
    """The server refused something; ``code`` is for programs (``busy``, ``invalid``, ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ReceivedChunk:
    """A chunk as it came: frames uint8 ``[T, H, W, 3]``, where it stands, and what the server said about it."""

    generation: int
    index: int
    first_frame: int
    frames: np.ndarray
    about: dict[str, Any]


@dataclass
class Talk:
    """What both kinds of sessions share: messages in and out, without any waiting."""

    record: SessionWriter | None = None
    image: bytes | None = None
    hello: dict[str, Any] = field(default_factory=dict)
    created: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    chunks: deque[ReceivedChunk] = field(default_factory=deque)
    answers: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=1000))
    over: str | None = None
    _about: dict[str, Any] | None = None
    _frames: list[np.ndarray] = field(default_factory=list)

    def take(self, message: str | bytes) -> None:
        """Sort one message of the server."""
        if isinstance(message, bytes):
            header, body = unpack(message)
            if self._about is None or header.generation < self.generation:
                return
            self._frames.append(decode(header, body))
            if len(self._frames) == self._about["frames"]:
                self.chunks.append(self._whole(self._about))
            return
        value = json.loads(message)
        if self.record is not None and "session" not in value and value["type"] != "hello":
            self.record.add(value)
        match value["type"]:
            case "hello":
                self.hello = value
                if self.record is not None:
                    self.record.begin(value, self.image)
            case "created":
                self.created, self.generation = value, value["generation"]
            case "chunk":
                self._about, self._frames = (None if value["skipped"] else value), []
            case "reset":
                self.generation = value["generation"]
                self.chunks.clear()
                self.answers.append(value)
            case "finished" | "closed":
                self.over = value.get("reason", "finished")
                self.answers.append(value)
            case _:
                self.answers.append(value)

    def _whole(self, about: dict[str, Any]) -> ReceivedChunk:
        frames, self._about, self._frames = np.stack(self._frames), None, []
        return ReceivedChunk(about["generation"], about["chunk"], about["first_frame"], frames, about)

    def answer(self, kind: str) -> dict[str, Any] | None:
        """The oldest answer of this kind, or an error, if one came."""
        for value in self.answers:
            if value["type"] in (kind, "error"):
                self.answers.remove(value)
                if value["type"] == "error" and kind != "error":
                    raise ServerError(value["code"], value["message"])
                return value
        return None


def control_message(control: Any) -> Any:
    if control is None or isinstance(control, str):
        return control
    return control_to_json(Control.of(control))


def prepare(url: str, token: str | None, image: Any, record: Any, options: dict[str, Any]) -> tuple[str, Any, Talk]:
    """Address, settings of the connection and first message of a session."""
    base = urlsplit(url if "//" in url else f"http://{url}")
    secure = base.scheme in ("https", "wss")
    data = None
    if image is not None:
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        options["image"] = upload(f"http{'s' * secure}://{base.netloc}", data, token)
    options["controls"] = [control_message(each) for each in options.get("controls", ())]
    talk = Talk(None if record is None else SessionWriter(record), data)
    offered = [SUBPROTOCOL] + ([] if token is None else [BEARER + encode_token(token)])
    # The server asks whether the client is still there; it can only answer while it reads, so a few seconds are kept.
    settings = {
        "subprotocols": offered, "max_size": MAX_MESSAGE, "max_queue": MAX_WAITING, "compression": None,
        "ping_interval": None, "proxy": None,
    }  # fmt: skip
    return f"ws{'s' * secure}://{base.netloc}/v1/session", settings, talk


def upload(url: str, image: bytes, token: str | None = None) -> str:
    """Send an image file; returns the name under which a session or a video may begin with it."""
    headers = {"content-type": "application/octet-stream"} | ({"authorization": f"Bearer {token}"} if token else {})
    with urlopen(Request(f"{url}/v1/images", image, headers), timeout=30) as response:
        return json.load(response)["id"]


def create_message(options: dict[str, Any]) -> str:
    if isinstance(options.get("seed"), int):
        options["seed"] = str(options["seed"])
    if "record_video" in options:
        options["record"] = options.pop("record_video")
    return json.dumps({"type": "create", "v": VERSION, **options})
