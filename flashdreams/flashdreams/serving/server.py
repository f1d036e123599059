"""The process of a server: uvicorn around the application, and an end in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.signals import handled_by
from flashdreams.serving.app import build_app
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.link import ProcessLink
from flashdreams.serving.service import Service

GOODBYE_TIMEOUT = 2.0
"""Seconds for clients to be told that the server ends."""


class Server(uvicorn.Server):
    """Ends its sessions before its connections, and leaves signals as it found them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.wind_down()
        begun = time.monotonic()
        while self._service.connections and time.monotonic() - begun < GOODBYE_TIMEOUT:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGTERM and Ctrl-C end the server, with exit code 0; a second Ctrl-C does so at once."""
        with handled_by(self.handle_exit, (signal.SIGINT, signal.SIGTERM)):  # in a thread, ``should_exit`` is set
            yield


def make_service(config: ServeConfig, runner: RunnerConfig) -> Service:
    """The service of ``runner``, with its model in a process of its own that starts when it does."""
    spec = {
        "pipeline": runner.pipeline, "acceleration": runner.acceleration, "device": config.device,
        "threads": config.threads, "warm_up": config.warm_up,
    }  # fmt: skip
    return Service(config, runner, ProcessLink(run_worker, spec))


def run_worker(connection: Any, spec: dict[str, Any]) -> None:
    """What the worker's process runs; torch is imported there, not here."""
    from flashdreams.serving.worker import WorkerSpec, serve_pipe

    serve_pipe(connection, WorkerSpec(**spec))


def make_server(config: ServeConfig, service: Service, failures: list[str]) -> Server:
    """A server that is not running yet; if the model cannot be loaded, why is added to ``failures`` and it ends."""

    def failed(why: str) -> None:
        failures.append(why)
        server.should_exit = True

    app = build_app(service, failed)
    settings = uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, server_header=False,
        proxy_headers=False, ws_max_size=config.max_message, ws_ping_interval=config.ping_interval,
        ws_ping_timeout=config.ping_timeout, ws_per_message_deflate=False, ws_max_queue=16,
        timeout_graceful_shutdown=int(config.shutdown_timeout), h11_max_incomplete_event_size=65536,
    )  # fmt: skip
    server = Server(settings, service)
    return server


def serve(config: ServeConfig, runner: RunnerConfig, announce: Any = print) -> None:
    """Serve until a signal ends it.

    Raises:
        UserError: it cannot be served: settings, port, model.
    """
    config.validate()
    listening = _bind(config)
    service = make_service(config, runner)
    failures: list[str] = []
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    logging.getLogger("aioice").setLevel(logging.WARNING)  # it tells of every address of every client
    with listening:
        listening.listen()  # who comes while the model is loaded waits, or is told so, and is not turned away
        host, port = listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        told = "open it in a browser; for programs: /docs; Ctrl-C ends it"
        announce(f"{runner.runner_name} at http://{name}:{port} ({told})", flush=True)
        make_server(config, service, failures).run(sockets=[listening])
    if failures:
        raise UserError(failures[0])


def _bind(config: ServeConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot listen at {config.host} port {config.port}: {reason}; choose another with --host and --port"
        ) from None
    return listening
