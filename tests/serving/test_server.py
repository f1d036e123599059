"""A server as people start it: tiny-world in a process of its own, clients over WebSocket, and what breaks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from flashdreams import load_pipeline
from flashdreams.client import ServerError, Session, replay
from flashdreams.core.controls import Keys
from flashdreams.plugins.registry import get_runner
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.server import make_service
from flashdreams.serving.steered import latent_digest
from serving import PROMPT, Running, junk, one_thread, running, until

pytestmark = pytest.mark.ci_cpu
CLIENT = """
import sys
from flashdreams.client import Session
with Session(sys.argv[1], "a red circle moves right on a blue background", delivery=sys.argv[2]) as session:
    for chunk in session:
        print(chunk.index, flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Generator[Running]:
    config = ServeConfig(port=0, threads=1, messages_per_second=10_000, snapshot_every=2)
    service = make_service(config, get_runner("tiny-world"))
    with running(config, service) as server:
        yield server


@pytest.fixture(scope="module")
def pipeline() -> Generator[Any]:
    with one_thread():
        yield load_pipeline("tiny-world", device="cpu")


def exact(server: Running, **options: Any) -> Session:
    return Session(server.url, PROMPT, encoding="raw", delivery="all", **options)


def gone(server: Running) -> None:
    """No session is left, within the time the documentation promises."""
    until(lambda: server.metric("sessions") == 0, 10)


def test_the_server_itself_holds_no_torch() -> None:
    program = "import sys, flashdreams.serving.server, flashdreams.client; print('torch' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.stdout.strip() == "False", outcome.stderr


def test_a_session_over_websocket_is_the_offline_rollout(server: Running, pipeline: Any, tmp_path: Path) -> None:
    """Frames bit for bit before encoding, and latents by their digest; with scripted controls; and its replay."""
    script = [None] * 5 + [Keys("a")] * 8
    with exact(server, seed=9007199254740993, controls=script, num_chunk=5, record=tmp_path / "it.jsonl") as session:
        assert session.created["seed"] == "9007199254740993"
        got = list(session)
    wanted = list(pipeline.rollout(PROMPT, seed=9007199254740993, num_chunk=5, control=script))
    for mine, chunk in zip(got, wanted, strict=True):
        assert torch.equal(torch.from_numpy(mine.frames), chunk.frames)
        assert mine.about["digest"] == latent_digest(chunk)
    other = next(pipeline.rollout(PROMPT, seed=9007199254740992, num_chunk=1))
    assert not torch.equal(other.frames, torch.from_numpy(got[0].frames))  # B10
    again = list(replay(tmp_path / "it.jsonl", pipeline))
    assert [each.same for each in again] == [True] * 5


def test_a_live_session_is_made_again_from_its_record(server: Running, pipeline: Any, tmp_path: Path) -> None:
    """Keys, a prompt, a snapshot, a reset and a restore, whenever they happened to come."""
    path, last = tmp_path / "live.jsonl", {}
    with Session(server.url, PROMPT, seed=4, encoding="raw", record=path) as session:
        chunks = iter(session)
        for turn in range(3):
            next(chunks)
            session.control(["left", Keys("s"), None][turn] or Keys())
        kept = session.snapshot()
        session.set_prompt("a green square moves left on a white background")
        next(chunks)
        session.reset(seed=5)
        assert next(chunks).generation == 1
        session.restore(kept)
        chunk = next(chunks)
        assert chunk.generation == 2
        last[chunk.generation, chunk.index] = chunk.frames
    made = {}
    for each in replay(path, pipeline):
        assert each.same
        made[each.generation, each.chunk.index] = each.chunk.frames.numpy()
    assert {generation for generation, _ in made} == {0, 1, 2}
    for key, frames in last.items():
        assert np.array_equal(made[key], frames)


def test_a_worker_that_is_killed_is_replaced_and_nobody_notices(server: Running, pipeline: Any) -> None:
    wanted = {seed: list(pipeline.rollout(PROMPT, seed=seed, num_chunk=6)) for seed in (1, 2)}
    restarts, got = server.metric("worker_restarts_total"), {}

    def follow(seed: int) -> None:
        with exact(server, seed=seed, num_chunk=6) as session:
            got[seed] = []
            for chunk in session:
                got[seed].append(chunk)

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    until(lambda: len(got.get(1, ())) >= 3)
    os.kill(server.service.scheduler.link.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(180)
    assert server.metric("worker_restarts_total") == restarts + 1
    for seed, chunks in wanted.items():
        assert [torch.equal(torch.from_numpy(a.frames), b.frames) for a, b in zip(got[seed], chunks, strict=True)] == [
            True
        ] * 6


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("delivery", ["live", "all"])
def test_a_client_that_vanishes_frees_its_slot(server: Running, kind: signal.Signals, delivery: str) -> None:
    """B15: killed, or stopped with its connection open."""
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.url, delivery], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        while client.stdout.readline() != "1\n":
            assert client.poll() is None
        client.send_signal(kind)
        gone(server)
        chunks = server.metric("chunks_total")
        time.sleep(1.0)
        assert server.metric("chunks_total") == chunks
        assert server.metric("session_bytes") == 0
    finally:
        client.kill()
        client.wait()


def test_a_client_comes_back_to_its_session(server: Running) -> None:
    address = f"ws://127.0.0.1:{server.port}/v1/session"
    with connect(address) as first:
        asked = {"type": "create", "v": 1, "prompt": PROMPT, "delivery": "all", "num_chunk": 3, "paused": True}
        first.send(json.dumps(asked))
        hello, created = json.loads(first.recv()), json.loads(first.recv())
        assert (hello["v"], hello["model"]) == (1, "tiny-world")
    with connect(address) as second:
        second.send(json.dumps({"type": "attach", "v": 1, "session": created["session"]}))
        told = [json.loads(message) for message in (second.recv() for _ in range(2)) if isinstance(message, str)]
        assert told[1]["session"] == created["session"]
        second.send(json.dumps({"type": "resume"}))
        pictures = 0
        while pictures < 9:
            pictures += isinstance(second.recv(), bytes)
    gone(server)


def test_junk_and_giants_harm_nobody_else(server: Running, pipeline: Any) -> None:
    """1,000 messages of junk, in the first message and later ones, beside a session that is not disturbed."""
    address, random_ = f"ws://127.0.0.1:{server.port}/v1/session", random.Random(1)
    with exact(server, seed=3, num_chunk=4) as good:
        sent = 0
        while sent < 1000:
            with connect(address, close_timeout=0.1) as bad:  # it reads nothing, not even the answer to its farewell
                try:
                    if random_.random() < 0.8:
                        bad.send(json.dumps({"type": "create", "v": 1, "prompt": PROMPT, "paused": True}))
                    for _ in range(100):
                        bad.send(junk(random_))
                        sent += 1
                except ConnectionClosed:
                    pass
        with connect(address) as giant:
            with pytest.raises(ConnectionClosed) as closed:
                _send_and_read_twice(giant, "x" * (2**20 + 1))
            assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
        with connect(address) as binary:
            binary.send(b"\x00" * 100)
            assert "binary" in [json.loads(binary.recv()), json.loads(binary.recv())][1]["message"]
        got = list(good)
    wanted = pipeline.rollout(PROMPT, seed=3, num_chunk=4)
    assert all(torch.equal(torch.from_numpy(a.frames), b.frames) for a, b in zip(got, wanted, strict=True))
    assert server.service.ready
    gone(server)


def test_mistakes_are_answered_and_the_session_goes_on(server: Running) -> None:
    with Session(server.url, PROMPT, delivery="all", num_chunk=2) as session:
        for ask in (lambda: session.restore("snapshot_none"), lambda: session._ask("x", type="prompt", prompt=" ")):
            with pytest.raises(ServerError):
                ask()
        session.control("sideways")
        session.pause()
        session.resume()
        assert [chunk.index for chunk in session] == [0, 1]
    with pytest.raises(ServerError, match="multiples of"):
        Session(server.url, PROMPT, height=100)


def test_sigterm_finishes_files_and_ends_well(tmp_path: Path) -> None:
    """Of a video that is being made, what there is can be played; clients are told; the exit code is 0."""
    words = ["serve", "tiny-world", "--port", "0", "--threads", "1", "--folder", str(tmp_path), "--no-warm-up"]
    program = "import sys; from flashdreams.scripts.main import main; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split()[0]
        here = Running(None, None, int(url.rpartition(":")[2]))  # type: ignore[arg-type]
        until(lambda: here.request("/readyz")[0] == 200, 180)
        _, video = here.request("/v1/videos", {"prompt": PROMPT, "num_frames": 10_000})
        with Session(url, PROMPT) as session:
            next(iter(session))
            until(lambda: here.request(f"/v1/videos/{video['id']}")[1]["frames"] > 5, 60)
            process.terminate()
            list(session)
            assert session._talk.over == "shutdown"
        assert process.wait(30) == 0
        with av.open(str(next(tmp_path.glob("video_*.mp4")))) as clip:
            assert sum(1 for _ in clip.decode(video=0)) > 5
        assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]
    finally:
        process.kill()


def _send_and_read_twice(socket: Any, message: str) -> None:
    socket.send(message)
    socket.recv()  # the hello, unless the end of the connection has overtaken it
    socket.recv()
