"""Videos that are asked for as a whole: they wait for a free session, and are made as any other session is."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from flashdreams.core.lengths import chunks_for
from flashdreams.serving.outbox import Delivery, Outbox
from flashdreams.serving.protocol import Name, ProtocolError, SceneFields
from flashdreams.serving.sessions import SessionOptions
from flashdreams.serving.videos import Video

if TYPE_CHECKING:
    from flashdreams.serving.service import Service

DEFAULT_SECONDS = 4.0


class VideoRequest(SceneFields):
    """A video as a whole."""

    model: Annotated[str, Field(max_length=200)] | None = None
    seconds: Annotated[float, Field(gt=0, le=100_000, strict=False)] | None = None
    """Of the video, rounded up to whole chunks."""
    num_frames: Annotated[int, Field(ge=1)] | None = None
    """Its length in frames instead."""
    size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")] | None = None
    """Width x height, such as ``832x480``; or give ``width`` and ``height``."""
    input_reference: Name | None = None
    """First frame, another name for ``image``."""


class Jobs:
    """Videos that wait or are being made."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._line = asyncio.Lock()
        """Held by the job that is the next to get a session."""

    async def submit(self, asked: VideoRequest) -> Video:
        """Take a job.

        Raises:
            ProtocolError: it cannot be made, or too many wait.
        """
        service = self._service
        if service.stopping or len(self._tasks) >= service.config.max_jobs:
            raise ProtocolError("busy", f"{len(self._tasks)} videos wait or are being made; try again later")
        if asked.model not in (None, service.runner.runner_name):
            raise ProtocolError(
                "unknown_model", f"this server has {service.runner.runner_name}, not {asked.model!r:.80}"
            )
        changes: dict[str, Any] = {}
        if asked.size is not None:
            width, height = map(int, asked.size.split("x"))
            changes |= {"width": width, "height": height}
        if asked.input_reference is not None:
            changes["image"] = asked.input_reference
        script = [service.takes.validate(control) for control in asked.controls]
        scene = await service.scene(asked.model_copy(update=changes))
        fps = Fraction(service.pipeline.fps).limit_denominator(1001)
        wanted = asked.num_frames or -int(-float((asked.seconds or DEFAULT_SECONDS) * fps) // 1)
        given = 1 if scene.image is not None and service.pipeline.image_use == "context" else 0
        if wanted > service.config.max_video_frames:
            raise ProtocolError("invalid", f"{wanted} frames were asked for; at most {service.config.max_video_frames}")
        num_chunk, total = 1, service.pipeline.frames_until(1)
        if not service.pipeline.diffusion_model.transformer.bidirectional:
            num_chunk = chunks_for(wanted, lambda chunks: service.pipeline.frames_until(chunks, given))
            total = service.pipeline.frames_until(num_chunk, given)
        video = service.videos.new(
            model=service.runner.runner_name, prompt=scene.prompt, seed=scene.seed, height=scene.height,
            width=scene.width, fps=fps, total=total,
        )  # fmt: skip
        service.metrics.videos += 1
        options = SessionOptions(service.pipeline.fps, service.takes, True, num_chunk, tuple(script), idle_exempt=True)
        task = self._tasks[video.id] = asyncio.create_task(self._make(video, scene, options))
        task.add_done_callback(lambda _: self._tasks.pop(video.id, None))
        return video

    async def cancel(self, video: Video) -> None:
        """Stop making ``video``."""
        if task := self._tasks.get(video.id):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all; what was made of them so far is kept."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, video: Video, scene: Any, options: SessionOptions) -> None:
        service, scheduler, session, sink = self._service, self._service.scheduler, None, None
        try:
            async with self._line:
                while session is None:
                    scheduler.freed.clear()
                    with suppress(ProtocolError):
                        session = scheduler.admit(scene, options)
                    if session is None and scheduler.broken is not None:
                        raise ProtocolError("failed", scheduler.broken)
                    if session is None:
                        await scheduler.freed.wait()
            made = session
            sink = service.videos.sink(video, scheduler.wake, lambda problem: scheduler.end(made, "failed", problem))
            session.sink = sink
            service.attach(session)
            video.error = await self._until_finished(session.outbox)
        except asyncio.CancelledError:
            if video.ended is None:
                video.note("cancelled", "it was cancelled, or the server was shut down")
            raise
        except Exception as error:
            video.note("failed", f"{error}")
        finally:
            if session is not None:
                scheduler.end(session, "finished")
            if sink is not None:
                await sink.done

    async def _until_finished(self, outbox: Outbox) -> str | None:
        """Take what is made, which goes to the file by itself; returns why it ended before it was whole."""
        while True:
            item = await outbox.next()
            self._service.scheduler.wake()
            if not isinstance(item, Delivery) and item["type"] in ("finished", "closed"):
                return None if item["type"] == "finished" else item["message"] or item["reason"]
