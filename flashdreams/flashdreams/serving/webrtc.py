"""The WebRTC side of a client's connection: its peer, if there is one, and which way pictures go. The package aiortc
is imported with the first peer."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from flashdreams.serving.outbox import Delivery, Overflow
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.security import RateLimit
from flashdreams.serving.sessions import Session

if TYPE_CHECKING:
    from flashdreams.serving.dispatch import Incoming
    from flashdreams.serving.service import Service
    from flashdreams.serving.webrtc_peer import Peer

log = logging.getLogger("flashdreams.serving")
OFFERS_PER_SECOND = 1.0
ANSWER_TIMEOUT = 10.0


class WebRTC:
    """Of one connection. Pictures go over its WebSocket until the client chooses otherwise, and again from when its
    peer has ended. Lives until :meth:`close`."""

    def __init__(self, service: Service, session: Session, incoming: Incoming) -> None:
        self._service, self._session, self._incoming = service, session, incoming
        self._peer: Peer | None = None
        self._chosen = False
        self._present: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Of the present peer, and of those that are being closed."""
        self._offers = RateLimit(OFFERS_PER_SECOND)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def offer(self, sdp: str) -> None:
        """Answer an offer, with a peer in place of the one there is; errors are told as the answer is.

        Raises:
            ProtocolError: not now, or never.
        """
        if not self._service.webrtc:
            raise ProtocolError("webrtc", "this server does not speak WebRTC; pictures come over the WebSocket")
        if not self._offers.allow("offer"):
            raise ProtocolError("webrtc", "too many offers; wait a second before the next one")
        self._drop()
        self._present = asyncio.create_task(self._serve(sdp))
        self._tasks.add(self._present)
        self._present.add_done_callback(self._tasks.discard)

    def choose(self, over: str) -> None:
        """Send pictures this way from the next chunk on.

        Raises:
            ProtocolError: there is no peer that is connected.
        """
        if over == "webrtc" and (self._peer is None or not self._peer.connected):
            raise ProtocolError("webrtc", "there is no WebRTC connection; pictures come over the WebSocket")
        self._chosen = over == "webrtc"

    async def show(self, item: Delivery) -> bool:
        """Hand a chunk to the peer, if pictures go that way; whether it was taken. Waits where a lossless session's
        peer has enough."""
        peer = self._peer
        if not self._chosen or peer is None:
            return False
        before = peer.playout.dropped
        taken = await peer.playout.put(item.generation, item.frames)
        dropped = peer.playout.dropped - before
        self._session.outbox.dropped += dropped
        self._service.metrics.dropped += dropped
        return taken

    async def failure(self) -> None:
        """Wait for a message over a peer's channel after which the connection has to end.

        Raises:
            ProtocolError: that.
        """
        await self._failure

    async def close(self) -> None:
        """End all peers. Returns in any case, within seconds."""
        self._drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _drop(self) -> None:
        self._peer, self._chosen = None, False
        if self._present is not None:
            self._present.cancel()
            self._present = None

    async def _serve(self, sdp: str) -> None:
        """A peer from its offer to its end."""
        from flashdreams.serving.webrtc_peer import OfferError, Peer
        from flashdreams.serving.webrtc_playout import Playout

        session = self._session
        playout = Playout(session.options.fps, lambda: session.generation, session.options.lossless)
        peer = Peer(self._service.config, playout, lambda message: self._heard(peer, message))
        self._service.peers += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                answer = await peer.answer(sdp)
            self._peer = peer
            self._say({"type": "webrtc_answer", "sdp": answer})
            why = await peer.ended()
            self._peer, self._chosen = None, False
            message = f"the WebRTC connection ended: {why}; pictures come over the WebSocket"
            self._say({"type": "notice", "code": "webrtc_ended", "message": message})
        except OfferError as error:
            self._service.metrics.bad_messages += 1
            self._say({"type": "error", "code": "webrtc", "message": str(error)[:500]})
        except TimeoutError:
            message = f"the offer could not be answered within {ANSWER_TIMEOUT:g} seconds; are the ICE servers there?"
            self._say({"type": "error", "code": "webrtc", "message": message})
        finally:
            if self._present is asyncio.current_task():
                self._present = None  # the close is not to be cancelled
            await peer.close()
            self._service.peers -= 1

    def _say(self, message: dict[str, Any]) -> None:
        if self._session.closed is not None:
            return
        try:
            self._session.outbox.say(message)
        except Overflow:
            self._service.scheduler.end(self._session, "lost", "the client does not read its messages")

    def _heard(self, peer: Peer, message: str | bytes) -> None:
        """A message came over a peer's channel."""
        if peer is not self._peer or self._failure.done() or self._session.closed is not None:
            return
        try:
            if not isinstance(message, str):
                raise ProtocolError("malformed", "a binary message came; clients send text (JSON)")
            if len(message) > self._service.config.max_message:
                raise ProtocolError("malformed", f"a message has {len(message)} characters; say less")
            self._incoming.take(message, lambda pong: peer.send(json.dumps(pong)))
        except ProtocolError as error:
            self._failure.set_exception(error)
