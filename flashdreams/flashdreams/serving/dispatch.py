"""What the messages of a client do to its session, whatever carried them (WebSocket, a data channel)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashdreams.core.controls import ControlError
from flashdreams.serving import protocol
from flashdreams.serving.outbox import Overflow
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.security import RateLimit
from flashdreams.serving.sessions import MAX_SNAPSHOTS, Session
from flashdreams.serving.webrtc import WebRTC

if TYPE_CHECKING:
    from flashdreams.serving.service import Service

MAX_BAD_MESSAGES = 100
"""Of one connection; who sends so many means harm, or will not succeed."""
Answer = dict[str, Any]


class Incoming:
    """The messages of one client, by all the ways it has."""

    def __init__(self, service: Service, session: Session) -> None:
        self.webrtc = WebRTC(service, session, self)
        self._service, self._session = service, session
        self._rate, self._bad = RateLimit(service.config.messages_per_second), 0

    def take(self, text: str, pong: Callable[[Answer], None] | None = None) -> None:
        """Do what ``text`` says. ``pong`` answers a ping on the way it came; all else is said by the outbox.

        Raises:
            ProtocolError: the connection has to end: too many messages, or too many that cannot be used.
        """
        if not self._rate.allow("client"):
            raise ProtocolError("rate", f"more than {self._rate.per_second:g} messages a second; say less")
        before = self._service.metrics.bad_messages
        try:
            handle_message(self._service, self._session, text, self.webrtc, pong)
        except Overflow:
            self._service.scheduler.end(self._session, "lost", "the client does not read its messages")
        self._bad += self._service.metrics.bad_messages - before
        if self._bad > MAX_BAD_MESSAGES:
            raise ProtocolError("malformed", "too many messages that cannot be used")


def handle_message(
    service: Service, session: Session, text: str, webrtc: WebRTC, pong: Callable[[Answer], None] | None = None
) -> None:
    """Do what ``text`` says; answers go to the session's outbox. A message that cannot be used changes nothing.

    Raises:
        Overflow: the client does not read its answers.
    """
    service.metrics.messages += 1
    try:
        message = protocol.parse_later(text)
        session.touch()
        answer = _apply(service, session, message, webrtc)
    except (ProtocolError, ControlError) as error:
        service.metrics.bad_messages += 1
        code = error.code if isinstance(error, ProtocolError) else "invalid"
        answer = {"type": "error", "code": code, "message": str(error)[:500]}
    if answer is not None and session.closed is None:
        (pong if pong and answer["type"] == "pong" else session.outbox.say)(answer)
    service.scheduler.wake()


def _apply(service: Service, session: Session, message: Any, webrtc: WebRTC) -> Answer | None:
    match message:
        case protocol.SetControl():
            session.control(message.control)
        case protocol.SetPrompt():
            if not service.pipeline.diffusion_model.transformer.takes_text:
                raise ProtocolError("invalid", f"{service.runner.runner_name} takes no prompt")
            if not message.prompt.strip():
                raise ProtocolError("invalid", "the prompt is empty; say in a few words what the video shows")
            session.prompt(message.prompt, message.negative_prompt, message.policy)
        case protocol.Pause():
            session.pause()
            return {"type": "paused", "generation": session.generation}
        case protocol.Resume():
            session.resume()
            return {"type": "resumed", "generation": session.generation}
        case protocol.Reset() | protocol.SetSeed():
            session.reset(message.seed)
            return {"type": "reset", "generation": session.generation, "seed": str(session.scene.seed)}
        case protocol.Snapshot():
            if session.wants_snapshots >= MAX_SNAPSHOTS:
                raise ProtocolError("too_many", f"{session.wants_snapshots} snapshots wait to be made; wait for them")
            session.wants_snapshots += 1
        case protocol.Restore():
            session.restore(message.snapshot)
            return {"type": "reset", "generation": session.generation, "seed": str(session.scene.seed)}
        case protocol.Close():
            service.scheduler.end(session, "closed", "as its client asked")
        case protocol.WebRTCOffer():
            webrtc.offer(message.sdp)
        case protocol.ChooseVideo():
            webrtc.choose(message.over)
        case protocol.Ping():
            return {"type": "pong", "t": message.t}
    return None


def created_message(session: Session) -> Answer:
    """What a client is told once it has a session."""
    scene = session.scene
    return {
        "type": "created", "session": session.id, "number": session.number, "generation": session.generation,
        "prompt": scene.prompt, "seed": str(scene.seed), "height": scene.height, "width": scene.width,
        "paused": session.paused, "video": session.video,
        "negative_prompt": scene.negative_prompt,
    }  # fmt: skip
