"""Everything a server holds, and what a client may ask of it, whatever way the asking comes."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

from flashdreams._version import __version__
from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.serving import protocol
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.images import Images
from flashdreams.serving.jobs import Jobs
from flashdreams.serving.link import Link, WorkerDied, WorkerError
from flashdreams.serving.metrics import Metrics, resident_bytes
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.scene import Scene
from flashdreams.serving.scheduler import Scheduler
from flashdreams.serving.sessions import Session, SessionOptions
from flashdreams.serving.videos import Videos

log = logging.getLogger("flashdreams.serving")


class Service:
    """One model, served. Used between :meth:`start` and :meth:`stop`, on one event loop.

    Raises:
        UserError: this model cannot be served.
    """

    def __init__(self, config: ServeConfig, runner: RunnerConfig, link: Link) -> None:
        config.validate()
        self.config, self.runner, self.pipeline = config, runner, runner.pipeline
        self.takes = self.pipeline.encoder.takes if self.pipeline.encoder else ControlSpec()
        if self.takes.pixels:
            raise UserError(f"{runner.runner_name} is controlled by a video, which the server does not take")
        if self.pipeline.diffusion_model.transformer.takes_last_image:
            raise UserError(f"{runner.runner_name} needs a last image too, which the server does not take")
        self.metrics = Metrics()
        self.images = Images(config)
        self._own_folder = config.folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="flashdreams-")) if config.folder is None else config.folder
        states = self.folder / f"states-{os.getpid()}"
        try:
            states.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            raise UserError(f"--folder {self.folder} cannot be used: {error.strerror or error}") from None
        self._states = states
        self.videos = Videos(self.folder, config)
        self.scheduler = Scheduler(link, config, self.pipeline.height * self.pipeline.width, self.metrics, states)
        self.jobs = Jobs(self)
        self.begun = time.time()
        self.state = "the model is being loaded"
        """Why it is not ready, while it is not."""
        self.stopping = False
        self.connections = 0
        """Clients that are connected."""
        self.webrtc = False
        """Whether clients may offer WebRTC."""
        self.peers = 0
        """WebRTC connections that are open."""
        self._task: asyncio.Task[None] | None = None

    async def load(self, on_failure: Callable[[str], None]) -> None:
        """:meth:`start`, beside a server that answers already."""
        try:
            await self.start()
        except UserError as error:
            self.state = str(error)
            on_failure(str(error))

    @property
    def ready(self) -> bool:
        """Whether a client would be served now, room aside."""
        return not self.stopping and self.scheduler.broken is None and self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            UserError: the model cannot be loaded.
        """
        if self.config.webrtc:
            with suppress(ImportError):  # hello tells clients
                await asyncio.to_thread(import_module, "flashdreams.serving.webrtc_peer")
                self.webrtc = True
        try:
            await self.scheduler.start()
        except WorkerError as error:
            raise UserError(f"{self.runner.runner_name} cannot be loaded: {error}") from None
        except WorkerDied:
            raise UserError(
                f"the worker died while it loaded {self.runner.runner_name}; is there enough memory?"
            ) from None
        self.state = "ready"
        self._task = asyncio.create_task(self.scheduler.run())
        self._task.add_done_callback(self._scheduler_ended)

    def _scheduler_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the scheduler failed", exc_info=error)
            self.scheduler.broken = "the server failed; it has to be started again"
            for session in list(self.scheduler.sessions.values()):
                self.scheduler.end(session, "failed", self.scheduler.broken)

    def wind_down(self) -> None:
        """Take nothing new, and end all sessions; their clients are told."""
        self.stopping, self.state = True, "the server is shutting down"
        for session in list(self.scheduler.sessions.values()):
            self.scheduler.end(session, "shutdown", self.state)

    async def stop(self) -> None:
        """End all sessions, finish all files, end the worker."""
        self.wind_down()
        await self.jobs.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.videos.finish()
        await self.scheduler.link.stop()
        shutil.rmtree(self.folder if self._own_folder else self._states, ignore_errors=True)

    async def scene(self, asked: protocol.SceneFields) -> Scene:
        """What a client asked for, checked.

        Raises:
            ProtocolError: the model cannot show it.
        """
        name, transformer = self.runner.runner_name, self.pipeline.diffusion_model.transformer
        if transformer.takes_text and not asked.prompt.strip():
            raise ProtocolError("invalid", "the prompt is empty; say in a few words what the video shows")
        if not transformer.takes_text and (asked.prompt or asked.negative_prompt):
            raise ProtocolError("invalid", f"{name} takes no prompt; leave it out")
        height, width = asked.height or self.pipeline.height, asked.width or self.pipeline.width
        multiple, most = self.pipeline.size_multiple, 4 * self.pipeline.height * self.pipeline.width
        if height % multiple or width % multiple or height * width > most:
            raise ProtocolError(
                "invalid", f"size {height}x{width} (height x width) is not served; expected multiples of {multiple}, "
                f"and {most} pixels or less"
            )  # fmt: skip
        image = None
        if asked.image is not None:
            upload = self.images.get(asked.image)
            image = await asyncio.to_thread(self.images.pixels, upload, height, width)
        elif self.pipeline.image_use == "concat":
            raise ProtocolError("invalid", f"{name} makes a video from an image; send one first (POST /v1/images)")
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        return Scene(asked.prompt, seed, height, width, asked.negative_prompt, image)

    async def create(self, asked: protocol.Create) -> Session:
        """A new session, attached to whoever asked for it.

        Raises:
            ProtocolError: it cannot be shown, or there is no room.
        """
        if not self.ready:
            raise ProtocolError("busy", f"not ready: {self.scheduler.broken or self.state}")
        script = [self.takes.validate(control) for control in asked.controls]
        scene = await self.scene(asked)
        limit = asked.num_chunk
        if self.pipeline.diffusion_model.transformer.bidirectional:
            limit = 1
        options = SessionOptions(self.pipeline.fps, self.takes, asked.delivery == "all", limit, tuple(script))
        session = self.scheduler.admit(scene, options)
        session.paused = asked.paused
        try:
            if asked.record:
                self._record(session)
        except ProtocolError as error:
            self.scheduler.end(session, "failed", str(error))
            raise
        self.attach(session)
        return session

    def _record(self, session: Session) -> None:
        scene = session.scene
        video = self.videos.new(
            model=self.runner.runner_name, prompt=scene.prompt, seed=scene.seed, height=scene.height,
            width=scene.width, fps=Fraction(self.pipeline.fps).limit_denominator(1001), total=None,
        )  # fmt: skip
        message = {"type": "notice", "code": "recording_ended"}

        def failed(error: str) -> None:
            with suppress(Exception):
                session.outbox.say(message | {"message": error})

        session.sink = self.videos.sink(video, self.scheduler.wake, failed)
        session.video = video.id

    def attach(self, session: Session) -> None:
        """Somebody takes the frames from now on."""
        session.attached, session.left = True, None
        session.touch()
        self.scheduler.wake()

    def detach(self, session: Session) -> None:
        """Nobody does; the session waits for a while for its client to come back."""
        session.leave()
        self.scheduler.wake()

    def session(self, name: str) -> Session:
        """A session by its name; ProtocolError where there is none."""
        if name not in self.scheduler.sessions:
            raise ProtocolError("unknown_session", "there is no such session (any more); create one")
        return self.scheduler.sessions[name]

    def gauges(self) -> list[tuple[str, str, float]]:
        """Present values for the metrics page."""
        sessions, worker = list(self.scheduler.sessions.values()), self.scheduler.started.get("pid", 0)
        return [
            ("ready", "Whether clients are served", float(self.ready)),
            ("sessions", "Sessions that are open", len(sessions)),
            ("sessions_active", "Of them, those that go on", sum(each.wait() is not None for each in sessions)),
            ("sessions_max", "Sessions that may be open", self.config.max_sessions),
            ("session_bytes", "Memory of the open sessions on the device", sum(each.num_bytes for each in sessions)),
            ("webrtc_connections", "WebRTC connections that are open", self.peers),
            ("queued_chunks", "Chunks that wait to be sent", sum(len(each.outbox) for each in sessions)),
            ("server_bytes", "Resident memory of the server process", resident_bytes()),
            ("worker_bytes", "Resident memory of the worker process", resident_bytes(worker)),
        ]  # fmt: skip

    def hello(self) -> dict[str, Any]:
        """What a client is told first."""
        return {
            "type": "hello", "v": protocol.VERSION, "server": __version__, **self.model(),
            "webrtc": self.webrtc, "ice_servers": self.config.ice(),
            "limits": {"max_message": self.config.max_message, "idle_timeout": self.config.idle_timeout,
                       "linger": self.config.linger, "max_image": self.config.max_image,
                       "max_image_pixels": self.config.max_image_pixels},
        }  # fmt: skip

    def model(self) -> dict[str, Any]:
        """The model, for people and pages."""
        config = self.pipeline
        transformer = config.diffusion_model.transformer
        return {
            "model": self.runner.runner_name, "description": self.runner.description, "fps": config.fps,
            "height": config.height, "width": config.width, "size_multiple": config.size_multiple,
            "takes_prompt": transformer.takes_text, "default_prompt": self.runner.prompt,
            "suggestions": list(config.text_encoder.suggestions) if config.text_encoder else [],
            "takes_image": config.image_use != "context" or not transformer.bidirectional,
            "needs_image": config.image_use == "concat", "takes": self.takes.to_dict(),
            "streams": not transformer.bidirectional,
        }  # fmt: skip
