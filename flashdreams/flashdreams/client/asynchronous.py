"""The same session for asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from flashdreams.client.talk import ReceivedChunk, ServerError, control_message, create_message, prepare


class AsyncSession:
    """As :class:`~flashdreams.client.session.Session`, whose arguments it takes, with ``async with`` and ``async for``;
    whatever says something is awaited."""

    def __init__(
        self, url: str, prompt: str = "", *, token: str | None = None, image: bytes | str | Path | None = None,
        record: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._options = {**options, "prompt": prompt} if prompt else options
        self._arguments = url, token, image, record
        self.created: dict[str, Any] = {}
        """What the server said: session, seed, size, ..."""

    async def __aenter__(self) -> AsyncSession:
        address, settings, self._talk = await asyncio.to_thread(prepare, *self._arguments, self._options)
        self._open = AsyncExitStack()
        self._socket = await self._open.enter_async_context(connect(address, **settings))
        try:
            await self._socket.send(create_message(self._options))
            while not self._talk.created:
                over = not await self._pump()
                self._talk.answer("created")
                if over:
                    raise ServerError("closed", "the server ended the connection")
        except BaseException:
            await self._open.aclose()
            raise
        self.created = self._talk.created
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedChunk]:
        while True:
            while not self._talk.chunks:
                if self._talk.over is not None or not await self._pump():
                    return
            yield self._talk.chunks.popleft()

    async def control(self, control: Any) -> None:
        """Hold ``control`` from the next chunk on: a word, the names of keys, or a control of flashdreams."""
        await self._say(type="control", control=control_message(control))

    async def set_prompt(self, prompt: str, negative_prompt: str | None = None, policy: str | None = None) -> None:
        """Show ``prompt`` from the next chunk on."""
        await self._say(type="prompt", prompt=prompt, negative_prompt=negative_prompt, policy=policy)

    async def pause(self) -> None:
        """Make no more chunks until :meth:`resume`."""
        await self._say(type="pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._say(type="resume")

    async def reset(self, seed: int | None = None) -> None:
        """Begin anew; frames from before are not handed out any more."""
        await self._ask("reset", type="reset", seed=None if seed is None else str(seed))

    async def snapshot(self) -> str:
        """Keep the state at the next chunk boundary; returns its name for :meth:`restore`."""
        return (await self._ask("snapshot", type="snapshot"))["snapshot"]

    async def restore(self, snapshot: str) -> None:
        """Go on from a snapshot."""
        await self._ask("reset", type="restore", snapshot=snapshot)

    async def close(self) -> None:
        """End the session."""
        try:
            await self._say(type="close")
            while self._talk.over is None and await self._pump():
                pass
        except ConnectionClosed:
            pass
        await self._open.aclose()
        if self._talk.record is not None:
            self._talk.record.close()

    async def _say(self, **message: Any) -> None:
        await self._socket.send(json.dumps(message))

    async def _ask(self, kind: str, **message: Any) -> dict[str, Any]:
        await self._say(**message)
        while (answer := self._talk.answer(kind)) is None:
            if not await self._pump():
                raise ServerError("closed", "the server ended the session")
        return answer

    async def _pump(self) -> bool:
        """Take one message; false once there are none any more."""
        try:
            self._talk.take(await self._socket.recv())
        except ConnectionClosed:
            return False
        return True
