"""What the messages of a client do to its session, whatever carried them (WebSocket, a data channel)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashdreams.core.controls import ControlError
from flashdreams.serving import protocol
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.sessions import MAX_SNAPSHOTS, Session

if TYPE_CHECKING:
    from flashdreams.serving.service import Service


def handle_message(service: Service, session: Session, text: str) -> None:
    """Do what ``text`` says; answers go to the session's outbox. A message that cannot be used changes nothing.

    Raises:
        Overflow: the client does not read its answers.
    """
    service.metrics.messages += 1
    try:
        message = protocol.parse_later(text)
        session.touch()
        answer = _apply(service, session, message)
    except (ProtocolError, ControlError) as error:
        service.metrics.bad_messages += 1
        code = error.code if isinstance(error, ProtocolError) else "invalid"
        answer = {"type": "error", "code": code, "message": str(error)[:500]}
    if answer is not None and session.closed is None:
        session.outbox.say(answer)
    service.scheduler.wake()


def _apply(service: Service, session: Session, message: Any) -> dict[str, Any] | None:
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
        case protocol.Ping():
            return {"type": "pong", "t": message.t}
    return None


def created_message(session: Session) -> dict[str, Any]:
    """What a client is told once it has a session."""
    scene = session.scene
    return {
        "type": "created", "session": session.id, "number": session.number, "generation": session.generation,
        "prompt": scene.prompt, "seed": str(scene.seed), "height": scene.height, "width": scene.width,
        "paused": session.paused, "video": session.video,
        "negative_prompt": scene.negative_prompt,
    }  # fmt: skip
