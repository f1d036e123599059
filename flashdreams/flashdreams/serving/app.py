"""The web application: page, HTTP API, WebSocket, health and metrics, behind :class:`~.security.Guard`."""

from __future__ import annotations

import asyncio
import json
import mimetypes
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path as Folder
from typing import Annotated, Any

from fastapi import Body, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket

from flashdreams._version import __version__
from flashdreams.core.controls import ControlError
from flashdreams.core.media import MediaError
from flashdreams.serving.jobs import VideoRequest
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.security import Guard
from flashdreams.serving.service import Service
from flashdreams.serving.websocket import serve_websocket

STATUS = {
    "busy": 503, "invalid": 422, "malformed": 400, "storage": 507, "unknown_image": 404, "unknown_model": 404,
    "unknown_session": 404, "unknown_video": 404, "not_ready": 409, "too_large": 413, "failed": 500,
}  # fmt: skip
PAGE = Folder(__file__).parent / "page"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
"""Nothing from elsewhere, nothing inline."""
VideoName = Annotated[str, Path(pattern=r"^video_[A-Za-z0-9_-]{1,64}$")]


class Problem(BaseModel):
    """What went wrong: a word for programs, a sentence for people."""

    code: str
    message: str


class Failure(BaseModel):
    """The body of every error."""

    error: Problem


def build_app(service: Service, on_failure: Callable[[str], None] = lambda _: None) -> Any:
    """The application; it starts and stops ``service``.

    Args:
        on_failure: told when the model cannot be loaded.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        loading = asyncio.create_task(service.load(on_failure))
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await service.stop()

    app = FastAPI(
        title="flashdreams", version=__version__, lifespan=lifespan, summary=service.runner.description,
        responses={code: {"model": Failure} for code in (400, 401, 403, 404, 413, 421, 422, 429, 503)},
        redoc_url=None,
    )  # fmt: skip
    app.add_api_websocket_route("/v1/session", _websocket(service))
    _errors(app)
    _page(app)
    _health(app, service)
    _videos(app, service)
    app.state.service = service
    return Guard(app, service.config, service.metrics)


def _websocket(service: Service) -> Callable[[WebSocket], Any]:
    async def session(socket: WebSocket) -> None:
        await serve_websocket(service, socket)

    return session


def _failure(status: int, code: str, message: str) -> JSONResponse:
    headers = {"retry-after": "5"} if status == 503 else None
    return JSONResponse({"error": {"code": code, "message": message[:500]}}, status, headers)


def _errors(app: FastAPI) -> None:
    """Every error has the same body."""

    async def protocol_error(request: Request, error: Any) -> JSONResponse:
        return _failure(STATUS.get(error.code, 400), error.code, str(error))

    async def control_error(request: Request, error: Exception) -> JSONResponse:
        return _failure(422, "invalid", str(error))

    async def not_valid(request: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] or first["loc"])[:80]
        return _failure(422, "invalid", f"{where}: {first['msg'].removeprefix('Value error, ')}")

    async def http_error(request: Request, error: Any) -> JSONResponse:
        response = _failure(error.status_code, "http", str(error.detail))
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> JSONResponse:
        return _failure(413, "too_large", "the body is longer than this server takes, or the client left")

    for kind, handler in (
        (ProtocolError, protocol_error), (ControlError, control_error), (RequestValidationError, not_valid),
        (HTTPException, http_error), (ClientDisconnect, gone),
    ):  # fmt: skip
        app.add_exception_handler(kind, handler)


class PageFiles(StaticFiles):
    """The files of the page, each with the headers of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Any:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def _page(app: FastAPI) -> None:
    """What people see; it holds nothing secret, and asks for the token itself."""
    mimetypes.add_type("text/javascript", ".js")  # some systems say text/plain, which browsers do not run
    app.mount("/static", PageFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


def _health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", summary="Whether the server runs", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok\n"

    @app.get("/readyz", summary="Whether the model is loaded and clients are served", response_class=PlainTextResponse)
    async def readyz() -> PlainTextResponse:
        return PlainTextResponse("ready\n" if service.ready else f"{service.state}\n", 200 if service.ready else 503)

    @app.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        facts = service.model()
        created = int(service.begun)
        return {"object": "list", "data": [{"id": facts["model"], "object": "model", "created": created, **facts}]}

    @app.post(
        "/v1/images", summary="Send a first frame", status_code=201,
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {
            "schema": {"type": "string", "format": "binary"}}}}},
    )  # fmt: skip
    async def images(request: Request) -> dict[str, Any]:
        data = await request.body()
        try:
            height, width, notices = await asyncio.to_thread(service.images.check, data)
        except MediaError as error:
            raise ProtocolError("invalid", str(error)) from None
        return {"id": service.images.add(data, height, width), "height": height, "width": width, "notices": notices}


def _videos(app: FastAPI, service: Service) -> None:
    @app.post("/v1/videos", summary="Ask for a video", status_code=202, responses={507: {"model": Failure}})
    async def create(asked: Annotated[VideoRequest, Body()]) -> dict[str, Any]:
        return (await service.jobs.submit(asked)).facts()

    @app.get("/v1/videos", summary="All videos there are")
    async def listing() -> dict[str, Any]:
        service.videos.tidy()
        return {"object": "list", "data": [video.facts() for video in service.videos]}

    @app.get("/v1/videos/{video_id}", summary="How far a video is")
    async def facts(video_id: VideoName) -> dict[str, Any]:
        return service.videos.get(video_id).facts()

    @app.delete("/v1/videos/{video_id}", summary="Stop and delete a video")
    async def delete(video_id: VideoName) -> dict[str, Any]:
        video = service.videos.get(video_id)
        await service.jobs.cancel(video)
        service.videos.remove(video_id)
        return {"id": video_id, "object": "video.deleted", "deleted": True}

    @app.get(
        "/v1/videos/{video_id}/content", summary="The mp4", response_class=FileResponse,
        responses={200: {"content": {"video/mp4": {}}}, 409: {"model": Failure}, 206: {}, 416: {}},
    )  # fmt: skip
    async def content(video_id: VideoName) -> FileResponse:
        video = service.videos.get(video_id)
        if video.status not in ("completed", "cancelled", "failed") or not video.path.exists():
            raise ProtocolError("not_ready", f"the video is {video.status}; {video.frames} frames are in it")
        return FileResponse(video.path, media_type="video/mp4", filename=f"{video.model}-{video.seed}.mp4")

    @app.get(
        "/v1/videos/{video_id}/events", summary="Its progress as server-sent events", response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )  # fmt: skip
    async def events(video_id: VideoName) -> StreamingResponse:
        video = service.videos.get(video_id)

        async def lines() -> AsyncIterator[str]:
            while True:
                changed = video.changed
                yield f"event: {video.status}\ndata: {json.dumps(video.facts())}\n\n"
                if video.ended is not None or service.stopping:
                    return
                try:
                    async with asyncio.timeout(10.0):
                        await changed.wait()
                except TimeoutError:
                    yield ": still here\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})
