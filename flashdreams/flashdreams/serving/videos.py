"""Videos on the server's disk: those that were asked for, and recordings of live sessions. Clients see names only."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from flashdreams.core.media import MediaError
from flashdreams.core.media.video import VideoWriter
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.protocol import ProtocolError

log = logging.getLogger("flashdreams.serving")
MAX_WAITING = 4
"""Chunks that wait to be written."""
MIN_FREE = 2**26
"""Bytes of disk that are left alone."""


@dataclass
class Video:
    """One video, as clients are told of it."""

    id: str
    path: Path
    model: str
    prompt: str
    seed: int
    height: int
    width: int
    fps: Fraction
    total: int | None
    """Frames it will have, if that is known."""
    created: float = field(default_factory=time.time)
    status: str = "queued"
    frames: int = 0
    error: str | None = None
    ended: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def facts(self) -> dict[str, Any]:
        """As the HTTP API shows it."""
        done = self.status == "completed"
        progress = 100 if done else int(100 * self.frames / self.total) if self.total else 0
        return {
            "id": self.id, "object": "video", "model": self.model, "status": self.status, "progress": progress,
            "created_at": int(self.created), "completed_at": int(self.ended) if self.ended and done else None,
            "prompt": self.prompt, "seed": str(self.seed), "size": f"{self.width}x{self.height}",
            "frames": self.frames, "seconds": f"{float(self.frames / self.fps):.3f}",
            "error": None if self.error is None else {"code": "generation_failed", "message": self.error},
        }  # fmt: skip

    def note(self, status: str | None = None, error: str | None = None) -> None:
        """Something changed; who waits for it is told."""
        self.status, self.error = status or self.status, error or self.error
        if self.status in ("completed", "failed", "cancelled") and self.ended is None:
            self.ended = time.time()
        self.changed.set()
        self.changed = asyncio.Event()


class VideoSink:
    """Writes the frames of a session to its video, beside the event loop. A write that fails ends the video only."""

    def __init__(self, video: Video, wake: Callable[[], None], failed: Callable[[str], None]) -> None:
        self.video = video
        self._wake, self._failed = wake, failed
        self._queue: asyncio.Queue[np.ndarray | None] = asyncio.Queue()
        self._writer = VideoWriter(video.path, video.fps, video.height, video.width)
        self._over = False
        video.note("in_progress")
        self.done = asyncio.create_task(self._write())

    @property
    def full(self) -> bool:
        """Whether another chunk would be one too many."""
        return not self._over and self._queue.qsize() >= MAX_WAITING

    def put(self, frames: np.ndarray) -> None:
        """Append a chunk's frames."""
        if not self._over:
            self._queue.put_nowait(frames)

    def end(self) -> None:
        """Finish the file once all that waits is in it."""
        if not self._over:
            self._over = True
            self._queue.put_nowait(None)

    async def _write(self) -> None:
        error: str | None = None
        try:
            while (frames := await self._queue.get()) is not None:
                await asyncio.to_thread(self._writer.write, frames)
                self.video.frames = self._writer.num_frames
                self.video.note()
                self._wake()
        except (MediaError, OSError, ValueError) as problem:
            error = f"the video cannot be written: {problem}"
            log.warning("%s: %s", self.video.id, error)
        self._over = True
        with suppress(MediaError, OSError):
            await asyncio.to_thread(self._writer.close)
        if error is not None:
            self._failed(error)
        error = error or self.video.error or (None if self.video.frames else "no frames were made")
        if self.video.ended is None:
            self.video.note("failed" if error else "completed", error)
        self._wake()


class Videos:
    """All videos of the server."""

    def __init__(self, folder: Path, config: ServeConfig) -> None:
        self.folder = folder
        self._config = config
        self._videos: dict[str, Video] = {}
        self._sinks: dict[str, VideoSink] = {}

    def __iter__(self) -> Any:
        return iter(self._videos.values())

    def new(self, **facts: Any) -> Video:
        """Make room for another one.

        Raises:
            ProtocolError: ``storage``: the disk or what may be used of it is full.
        """
        self.tidy()
        used = sum(video.path.stat().st_size for video in self._videos.values() if video.path.exists())
        if used > self._config.storage or shutil.disk_usage(self.folder).free < MIN_FREE:
            raise ProtocolError("storage", "there is no room for another video; fetch and delete the old ones first")
        name = "video_" + secrets.token_urlsafe(12)
        self._videos[name] = video = Video(name, self.folder / f"{name}.mp4", **facts)
        return video

    def sink(self, video: Video, wake: Callable[[], None], failed: Callable[[str], None]) -> VideoSink:
        """What writes ``video``."""
        sink = self._sinks[video.id] = VideoSink(video, wake, failed)
        return sink

    def get(self, name: str) -> Video:
        """A video by its name; ProtocolError where there is none."""
        if name not in self._videos:
            raise ProtocolError("unknown_video", f"there is no video {name!r:.80} (any more)")
        return self._videos[name]

    def remove(self, name: str) -> None:
        """Forget a video and its file."""
        video = self._videos.pop(name, None)
        self._sinks.pop(name, None)
        if video is not None:
            video.path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Forget what is older than videos are kept."""
        limit = time.time() - self._config.keep_videos
        for name in [v.id for v in self._videos.values() if v.ended is not None and v.ended < limit]:
            self.remove(name)

    async def finish(self) -> None:
        """Finish every file."""
        for sink in self._sinks.values():
            sink.end()
        await asyncio.gather(*(sink.done for sink in self._sinks.values()), return_exceptions=True)
