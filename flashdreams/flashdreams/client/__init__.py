"""Talk to a server (``flashdreams serve``) from Python: :class:`Session`, and :class:`AsyncSession` for asyncio.

    from flashdreams.client import Session

    with Session("http://localhost:8000", prompt="a red circle moves right on a blue background") as session:
        for chunk in session:
            show(chunk.frames)  # uint8 [T, H, W, 3]
            session.control("left")

Needs ``flashdreams[serve]``, and neither torch nor a model; :func:`replay` makes a recorded session again with both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashdreams.client.asynchronous import AsyncSession
from flashdreams.client.session import Session
from flashdreams.client.talk import ReceivedChunk, ServerError, upload

if TYPE_CHECKING:
    from flashdreams.serving.replay import replay

__all__ = ["AsyncSession", "ReceivedChunk", "ServerError", "Session", "replay", "upload"]


def __getattr__(name: str) -> Any:
    """Import on demand what needs torch."""
    if name == "replay":
        from flashdreams.serving.replay import replay

        return replay
    raise AttributeError(f"module 'flashdreams.client' has no attribute {name!r}")
