"""A browser's part of WebRTC, played by aiortc, on this machine's own address alone. As a program it is a client that
can be killed: ``webrtc_client.py URL`` says ``playing`` once video comes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av.video.frame import VideoFrame
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from flashdreams.serving import pictures, wire
from flashdreams.serving.webrtc_track import COLORSPACES, magnification


class Browser:
    """A session over WebSocket, and a peer connection beside it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.said: list[dict[str, Any]] = []
        """All messages of the server."""
        self.pictures: list[tuple[wire.FrameHeader, np.ndarray]] = []
        """That came over the WebSocket."""
        self.frames: list[VideoFrame] = []
        """That came over WebRTC."""
        self.pongs: list[str] = []
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.over = False
        """Whether the WebSocket is closed."""
        self.answer = ""
        self.before = 0
        """Frames at a moment that a test remembers."""
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait for ``condition``, looked at whenever something came; what it gives."""
        async with asyncio.timeout(seconds):
            while not (value := condition()):
                self._news.clear()
                await self._news.wait()
        return value

    async def told(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first message of this kind, with these fields."""
        wanted = {"type": kind, **fields}
        return await self.until(lambda: next((each for each in self.said if wanted.items() <= each.items()), None))

    async def listen(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                message = await self.socket.recv()
                if isinstance(message, bytes):
                    header, body = wire.unpack(message)
                    self.pictures.append((header, pictures.decode(header, body)))
                else:
                    self.said.append(json.loads(message))
                self._news.set()
        self.over = True
        self._news.set()

    async def offer(self, codec: str | None = None) -> str:
        """An offer of one video, of ``codec`` (such as ``video/VP8``) alone if it is given, and a channel."""
        video = self.pc.addTransceiver("video", "recvonly")
        if codec is not None:
            codecs = RTCRtpReceiver.getCapabilities("video").codecs
            video.setCodecPreferences([each for each in codecs if each.mimeType == codec])
        self.channel = self.pc.createDataChannel("control")
        self.channel.on("message", self._heard)
        self.channel.on("open", self._news.set)
        self.pc.on("track", lambda track: self._tasks.append(asyncio.create_task(self._watch(track))))
        self.pc.on("connectionstatechange", self._news.set)
        self._stay_here()
        await self.pc.setLocalDescription()
        return self.pc.localDescription.sdp

    async def connect(self, codec: str | None = None) -> None:
        """Offer, and wait until the channel is open."""
        await self.say("webrtc_offer", sdp=await self.offer(codec))
        self.answer = (await self.told("webrtc_answer"))["sdp"]
        await self.pc.setRemoteDescription(RTCSessionDescription(self.answer, "answer"))
        await self.until(lambda: self.channel.readyState == "open")

    def shown(self, index: int, height: int, width: int) -> np.ndarray:
        """A frame that came over WebRTC as the session made it, uint8 ``[height, width, 3]``."""
        codec = "video/h264" if "H264" in self.answer else "video/vp8"
        frame = self.frames[index].reformat(format="rgb24", src_colorspace=COLORSPACES[codec]).to_ndarray()
        factor = magnification(height, width)
        assert frame.shape == (height * factor, width * factor, 3)
        return frame[factor // 2 :: factor, factor // 2 :: factor]

    def cut(self) -> None:
        """Neither hear nor say anything over WebRTC any more, without a goodbye."""
        for protocol in self.pc.getTransceivers()[0].receiver.transport.transport._connection._protocols:
            protocol.transport.abort()

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.pc.close()

    def _heard(self, message: str) -> None:
        self.pongs.append(message)
        self._news.set()

    async def _watch(self, track: Any) -> None:
        with suppress(MediaStreamError):
            while True:
                self.frames.append(await track.recv())
                self._news.set()

    def _stay_here(self) -> None:
        for transport in {self.pc.getTransceivers()[0].receiver.transport, self.pc.sctp.transport}:
            connection = transport.transport.iceGatherer._connection
            gather = connection.get_component_candidates
            connection.get_component_candidates = lambda component, addresses, gather=gather: gather(
                component=component, addresses=["127.0.0.1"]
            )


@asynccontextmanager
async def browser(url: str, **create: Any) -> AsyncIterator[Browser]:
    """A session at a server, and all that belongs to it until the block ends."""
    address = url.replace("http://", "ws://") + "/v1/session"
    async with connect(address, max_size=None) as socket:
        made = Browser(socket)
        listening = asyncio.create_task(made.listen())
        await made.say("create", v=1, **create)
        await made.told("created")
        try:
            yield made
        finally:
            await made.leave()
            listening.cancel()


async def main(url: str) -> None:
    async with browser(url, prompt="a ball") as here:
        await here.connect()
        await here.say("video", over="webrtc")
        await here.until(lambda: len(here.frames) > 5)
        print("playing", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
