"""The WebSocket transport: text messages both ways, a binary message per picture."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from flashdreams.core.controls import ControlError
from flashdreams.serving import protocol
from flashdreams.serving.dispatch import Incoming, created_message
from flashdreams.serving.outbox import Delivery
from flashdreams.serving.pictures import encode
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.service import Service
from flashdreams.serving.sessions import Session
from flashdreams.serving.webrtc import WebRTC
from flashdreams.serving.wire import FrameHeader

FIRST_MESSAGE_TIMEOUT = 10.0
GOING_AWAY, POLICY, TRY_LATER = 1001, 1008, 1013
_encoders = ThreadPoolExecutor(2, "encode")


async def serve_websocket(service: Service, socket: WebSocket) -> None:
    """One connection from its first message to its end. Its session outlives it for a while (``linger``)."""
    await socket.accept(subprotocol=protocol.SUBPROTOCOL if protocol.SUBPROTOCOL in _offered(socket) else None)
    session: Session | None = None
    service.connections += 1
    try:
        await socket.send_json(service.hello())
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT):
            first = protocol.parse_first(await _text(socket))
        if isinstance(first, protocol.Create):
            session = await service.create(first)
        else:
            session = service.session(first.session)
            if session.attached:
                session = None
                raise ProtocolError("attached", "another connection has this session; close that one first")
            service.attach(session)
        await socket.send_json(created_message(session))
        await _both_ways(service, socket, session, first)
    except (ProtocolError, ControlError) as error:
        code = error.code if isinstance(error, ProtocolError) else "invalid"
        service.metrics.bad_messages += code != "busy"  # a refusal, which is counted as one
        await _goodbye(socket, {"type": "error", "code": code, "message": str(error)[:500]},
                       TRY_LATER if code == "busy" else POLICY)  # fmt: skip
    except TimeoutError:
        await _goodbye(socket, {"type": "error", "code": "timeout", "message": "no message came in time"}, POLICY)
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass  # the client is gone
    finally:
        service.connections -= 1
        if session is not None:
            service.detach(session)


def _offered(socket: WebSocket) -> list[str]:
    return socket.scope.get("subprotocols", [])


async def _both_ways(service: Service, socket: WebSocket, session: Session, view: protocol.View) -> None:
    """Until one way ends; then the others are ended too."""
    incoming = Incoming(service, session)
    ways = [
        asyncio.create_task(_receive(socket, session, incoming)),
        asyncio.create_task(_send(service, socket, session, view, incoming.webrtc)),
        asyncio.create_task(incoming.webrtc.failure()),
    ]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await incoming.webrtc.close()


async def _receive(socket: WebSocket, session: Session, incoming: Incoming) -> None:
    while session.closed is None:
        incoming.take(await _text(socket))


async def _text(socket: WebSocket) -> str:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    if message.get("text") is None:
        raise ProtocolError("malformed", "a binary message came; clients send text (JSON)")
    return message["text"]


async def _send(service: Service, socket: WebSocket, session: Session, view: protocol.View, webrtc: WebRTC) -> None:
    limit = service.config.send_timeout
    while True:
        item = await session.outbox.next()
        service.scheduler.wake()
        if isinstance(item, Delivery):
            await _send_chunk(socket, session, view, item, webrtc, limit)
            continue
        async with asyncio.timeout(limit):
            await socket.send_json(item)
        if item["type"] == "closed":
            with suppress(RuntimeError):
                await socket.close(GOING_AWAY if item["reason"] == "shutdown" else 1000, item["reason"])
            return


async def _send_chunk(
    socket: WebSocket, session: Session, view: protocol.View, item: Delivery, webrtc: WebRTC, limit: float
) -> None:
    """The message about a chunk, then its pictures; what became stale meanwhile is left out."""
    loop = asyncio.get_running_loop()
    stale = item.generation != session.generation
    async with asyncio.timeout(limit):
        await socket.send_json(item.about | {"skipped": stale})
    if stale or await webrtc.show(item):
        return
    fps, (_, height, width, _) = session.options.fps, item.frames.shape
    for i, frame in enumerate(item.frames):
        body = await loop.run_in_executor(_encoders, encode, frame, view.encoding, view.quality)
        if item.generation != session.generation:
            return
        number = item.first_frame + i
        header = FrameHeader(
            view.encoding, session.number, item.generation, item.chunk, number, number / fps, height, width
        )
        async with asyncio.timeout(limit):
            await socket.send_bytes(header.pack() + body)


async def _goodbye(socket: WebSocket, message: dict[str, Any], code: int) -> None:
    with suppress(RuntimeError, WebSocketDisconnect, OSError, TimeoutError):
        async with asyncio.timeout(2.0):
            await socket.send_json(message)
            await socket.close(code, message["code"])
