"""The HTTP API, and who may use it. The model is the small template, in a thread."""

from __future__ import annotations

import asyncio
import io
import resource
from collections.abc import Generator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from flashdreams.client import AsyncSession, ServerError, Session
from flashdreams.core.media import MediaError
from flashdreams.core.media.video import VideoWriter
from flashdreams.infra.errors import UserError
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.security import RateLimit, decode_token, encode_token
from serving import Running, running, template_service, until

pytestmark = pytest.mark.ci_cpu
CASES = Path(__file__).parents[1] / "cases"
TOKEN = "only-for-this-test-7f3a"


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    service = template_service(requests_per_second=10_000)
    with running(service.config, service) as server:
        yield server


def wait_for(server: Running, video: dict[str, Any]) -> dict[str, Any]:
    return until(lambda: (it := server.request(f"/v1/videos/{video['id']}")[1])["status"] not in
                 ("queued", "in_progress") and it)  # fmt: skip


def test_health_models_and_page_of_the_api(server: Running) -> None:
    assert server.request("/healthz") == (200, b"ok\n")
    assert server.request("/readyz") == (200, b"ready\n")
    status, models = server.request("/v1/models")
    assert (status, models["data"][0]["id"]) == (200, "template")
    assert server.request("/docs")[0] == 200
    assert "/v1/videos" in server.request("/openapi.json")[1]["paths"]


def test_a_video_from_the_request_to_the_file(server: Running) -> None:
    status, video = server.request("/v1/videos", {"prompt": "a ball", "seconds": 2, "size": "48x32", "seed": "5"})
    assert (status, video["object"], video["seed"]) == (202, "video", "5")
    done = wait_for(server, video)
    assert (done["status"], done["progress"], done["frames"]) == ("completed", 100, 33)
    status, data = server.request(f"/v1/videos/{video['id']}/content")
    with av.open(io.BytesIO(data)) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == 33
    assert server.request(f"/v1/videos/{video['id']}", method="DELETE")[1]["deleted"]
    assert server.request(f"/v1/videos/{video['id']}/content")[0] == 404
    assert not list(server.service.folder.glob("video_*"))


def test_progress_is_told_as_it_grows(server: Running) -> None:
    _, video = server.request("/v1/videos", {"prompt": "a ball", "num_frames": 60})
    _, data = server.request(f"/v1/videos/{video['id']}/events")
    events = [line.removeprefix("event: ") for line in data.decode().splitlines() if line.startswith("event: ")]
    assert events[-1] == "completed"
    assert set(events) <= {"queued", "in_progress", "completed"}


def test_videos_wait_for_a_free_session() -> None:
    service = template_service(max_sessions=1, max_jobs=3)
    with running(service.config, service) as server:
        videos = [server.request("/v1/videos", {"prompt": "a ball", "num_frames": 400}) for _ in range(4)]
        assert [status for status, _ in videos] == [202, 202, 202, 503]
        first, second, third = (video for _, video in videos[:3])
        assert server.request(f"/v1/videos/{third['id']}", method="DELETE")[0] == 200
        assert [wait_for(server, video)["status"] for video in (first, second)] == ["completed"] * 2


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": ""}, 422, "the prompt is empty"),
        ({"prompt": "x", "size": "50x32"}, 422, "multiples of"),
        ({"prompt": "x", "size": "9999x9999"}, 422, "is not served"),
        ({"prompt": "x", "seed": "1e3"}, 422, "whole number"),
        ({"prompt": "x", "seconds": -1}, 422, "seconds"),
        ({"prompt": "x", "num_frames": 10**9}, 422, "at most"),
        ({"prompt": "x", "model": "other"}, 404, "this server has template"),
        ({"prompt": "x", "input_reference": "image_none"}, 404, "no image"),
        ({"prompt": "x", "controls": [99]}, 422, "control"),
        ({"prompt": "x", "path": "/etc/passwd"}, 422, "path"),
        (b"{", 422, ""),
        (b"\xff\xfe", 422, ""),
    ],
)
def test_a_request_that_cannot_be_met_says_why(server: Running, body: Any, status: int, says: str) -> None:
    got, answer = server.request("/v1/videos", body)
    assert got == status
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/videos/../../etc/passwd/content", "/v1/videos/video_%2e%2e%2fx/content",
                                  "/v1/videos/video_x/content", "/static/../../pyproject.toml"])  # fmt: skip
def test_no_path_leads_to_a_file(server: Running, path: str) -> None:
    assert server.request(path)[0] in (404, 422)


def test_images_beyond_the_limits_are_refused_before_they_are_unpacked(server: Running) -> None:
    """B04."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, answer = server.request("/v1/images", (CASES / "B04/bomb_40960x40960_1bit.png").read_bytes())
    assert status == 422
    assert "1,677,721,600 pixels; the limit is 33,554,432" in answer["error"]["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    for name in ("between_limits_10240x10240_1bit.png", "zero_byte.png", "truncated.png", "text_named.jpg"):
        status, answer = server.request("/v1/images", (CASES / "B04" / name).read_bytes())
        assert (status, bool(answer["error"]["message"])) == (422, True)
    assert server.service.ready


@pytest.mark.parametrize(("path", "limit"), [("/v1/images", 2**24), ("/v1/videos", 2**21)])
def test_a_body_beyond_the_limit_is_refused_unread(server: Running, path: str, limit: int) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", path)
    connection.putheader("content-length", str(limit + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_disk_that_is_full_is_said(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: VideoWriter, frames: Any) -> None:
        raise MediaError("No space left on device")

    monkeypatch.setattr(VideoWriter, "write", full)
    _, video = server.request("/v1/videos", {"prompt": "a ball", "num_frames": 30})
    assert "No space left" in wait_for(server, video)["error"]["message"]
    with Session(server.url, "a ball", delivery="all", record_video=True, num_chunk=3) as session:
        assert len(list(session)) == 3  # the live session goes on
    monkeypatch.setattr(server.service.videos, "_config", ServeConfig(storage=-1))
    status, answer = server.request("/v1/videos", {"prompt": "a ball"})
    assert (status, answer["error"]["code"]) == (507, "storage")


def test_a_session_can_be_downloaded(server: Running) -> None:
    with Session(server.url, "a ball", delivery="all", record_video=True, num_chunk=3) as session:
        frames = sum(len(chunk.frames) for chunk in session)
    name = session.created["video"]
    until(lambda: server.request(f"/v1/videos/{name}")[1]["status"] == "completed")
    with av.open(io.BytesIO(server.request(f"/v1/videos/{name}/content")[1])) as clip:
        assert sum(1 for _ in clip.decode(video=0)) == frames


def test_a_token_is_asked_of_everyone(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    service = template_service(token=TOKEN)
    assert TOKEN not in repr(service.config)
    with running(service.config, service) as server:
        assert server.request("/healthz")[0] == server.request("/readyz")[0] == 200
        for path in ("/metrics", "/v1/models", "/v1/videos", "/openapi.json", f"/v1/models?token={TOKEN}"):
            assert server.request(path)[0] == 401
        assert server.request("/v1/models", authorization=f"Bearer {TOKEN}x")[0] == 401
        assert server.request("/v1/models", authorization=f"Bearer {TOKEN}")[0] == 200
        with Session(server.url, "a ball", token=TOKEN, num_chunk=1, delivery="all") as session:
            assert len(list(session)) == 1
        for wrong in (None, TOKEN[:-1]):
            with pytest.raises(Exception, match="401"):
                Session(server.url, "a ball", token=wrong)
    said = capsys.readouterr()
    assert TOKEN not in caplog.text + said.out + said.err


def test_pages_of_other_origins_and_names_are_refused(server: Running) -> None:
    assert server.request("/v1/models", origin=server.url)[0] == 200
    assert server.request("/v1/models", origin="https://evil.example")[0] == 403
    assert server.request("/v1/models", origin="null")[0] == 403
    assert server.request("/v1/models", host="evil.example")[0] == 421
    assert server.request("/v1/models", host=f"localhost:{server.port}")[0] == 200


def test_who_asks_too_often_has_to_wait() -> None:
    now = [0.0]
    rate = RateLimit(2.0, lambda: now[0])
    assert [rate.allow("a") for _ in range(6)] == [True] * 4 + [False] * 2
    assert rate.allow("b")
    now[0] += 1.0
    assert [rate.allow("a") for _ in range(3)] == [True, True, False]


def test_other_addresses_need_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UserError, match="needs a token"):
            ServeConfig(host=host).validate()
        ServeConfig(host=host, token=TOKEN).validate()
    for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1"):
        ServeConfig(host=host).validate()
    with pytest.raises(UserError, match="the token has 3 characters"):
        ServeConfig(token="abc").validate()
    assert decode_token(encode_token(TOKEN)) == TOKEN


def test_a_client_is_told_that_the_server_is_busy() -> None:
    service = template_service(max_sessions=1)
    with running(service.config, service) as server, Session(server.url, "a ball"):
        with pytest.raises(ServerError, match="all 1 sessions are taken") as refused:
            Session(server.url, "a ball")
        assert refused.value.code == "busy"
        assert server.metric("sessions_refused_total") == 1
        assert server.metric("messages_bad_total") == 0, "there was nothing wrong with what was said"


def test_the_asyncio_client_is_the_same(server: Running) -> None:
    async def watch() -> list[tuple[int, str]]:
        async with AsyncSession(server.url, "a ball", seed=3, delivery="all", num_chunk=3) as session:
            got = []
            async for chunk in session:
                got.append((chunk.index, chunk.about["digest"]))
                if chunk.index == 0:
                    await session.snapshot()
            return got

    with Session(server.url, "a ball", seed=3, delivery="all", num_chunk=3) as session:
        assert asyncio.run(watch()) == [(chunk.index, chunk.about["digest"]) for chunk in session]


def test_a_session_begins_with_an_image_that_was_sent(server: Running) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((64, 96, 3), 200, np.uint8)).save(stream, "PNG")
    with Session(server.url, "a ball", seed=3, image=stream.getvalue(), delivery="all", num_chunk=2) as session:
        with_image = [chunk.about["digest"] for chunk in session]
    with Session(server.url, "a ball", seed=3, delivery="all", num_chunk=2) as session:
        assert [chunk.about["digest"] for chunk in session] != with_image
