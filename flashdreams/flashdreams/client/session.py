"""A session that waits where it has to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from flashdreams.client.talk import ReceivedChunk, ServerError, control_message, create_message, prepare


class Session:
    """A session with a server: iterate for its chunks; between them it can be steered.

    Args:
        url: of the server.
        prompt: what the video shows.
        image: an image file to begin with, as a path or its bytes.
        record: keep a record here, which :func:`replay` makes the session again from.
        options: ``seed``, ``height``, ``width``, ``negative_prompt``, ``controls`` (one per frame), ``num_chunk``,
            ``delivery`` (``live`` or ``all``), ``encoding`` (``raw``, ``jpeg``, ``webp``, ``png``), ``quality``,
            ``record_video`` (the server keeps an mp4).

    Raises:
        ServerError: the server refuses it, as when it is busy.
    """

    def __init__(
        self, url: str, prompt: str = "", *, token: str | None = None, image: bytes | str | Path | None = None,
        record: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if prompt:
            options["prompt"] = prompt
        address, settings, self._talk = prepare(url, token, image, record, options)
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(address, **settings))
        try:
            self._socket.send(create_message(options))
            while not self._talk.created:
                over = not self._pump()
                self._talk.answer("created")
                if over:
                    raise ServerError("closed", "the server ended the connection")
        except BaseException:
            self._open.close()
            raise
        self.created = self._talk.created
        """What the server said: session, seed, size, ..."""

    def __iter__(self) -> Iterator[ReceivedChunk]:
        while True:
            while not self._talk.chunks:
                if self._talk.over is not None or not self._pump():
                    return
            yield self._talk.chunks.popleft()

    def control(self, control: Any) -> None:
        """Hold ``control`` from the next chunk on: a word, the names of keys, or a control of flashdreams."""
        self._say(type="control", control=control_message(control))

    def set_prompt(self, prompt: str, negative_prompt: str | None = None, policy: str | None = None) -> None:
        """Show ``prompt`` from the next chunk on."""
        self._say(type="prompt", prompt=prompt, negative_prompt=negative_prompt, policy=policy)

    def pause(self) -> None:
        """Make no more chunks until :meth:`resume`."""
        self._say(type="pause")

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._say(type="resume")

    def reset(self, seed: int | None = None) -> None:
        """Begin anew; frames from before are not handed out any more."""
        self._ask("reset", type="reset", seed=None if seed is None else str(seed))

    def snapshot(self) -> str:
        """Keep the state at the next chunk boundary; returns its name for :meth:`restore`."""
        return self._ask("snapshot", type="snapshot")["snapshot"]

    def restore(self, snapshot: str) -> None:
        """Go on from a snapshot."""
        self._ask("reset", type="restore", snapshot=snapshot)

    def close(self) -> None:
        """End the session."""
        try:
            self._say(type="close")
            while self._talk.over is None and self._pump():
                pass
        except ConnectionClosed:
            pass
        self._open.close()
        if self._talk.record is not None:
            self._talk.record.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _say(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))

    def _ask(self, kind: str, **message: Any) -> dict[str, Any]:
        self._say(**message)
        while (answer := self._talk.answer(kind)) is None:
            if not self._pump():
                raise ServerError("closed", "the server ended the session")
        return answer

    def _pump(self) -> bool:
        """Take one message; false once there are none any more."""
        try:
            self._talk.take(self._socket.recv())
        except ConnectionClosed:
            return False
        return True
