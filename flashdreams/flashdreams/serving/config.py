"""What a server is told, and its limits. Imports neither torch nor the web framework."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from flashdreams.infra.errors import UserError

TOKEN_VARIABLE = "FLASHDREAMS_TOKEN"
MIN_TOKEN = 16
"""Characters; a token that can be guessed protects nothing."""
_STUN = re.compile(r"stun:[\w.-]+(:\d+)?")
_TURN = re.compile(r"(turns?:)([^:@\s]+):([^@\s]+)@([\w.-]+(?::\d+)?(?:\?transport=(?:udp|tcp))?)")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of one server. Times are seconds, sizes bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    """Asked of every client; needed for any address that others can reach."""
    allow_origins: tuple[str, ...] = ()
    """Web pages of other origins that may use the server, such as ``https://example.org``."""
    allow_hosts: tuple[str, ...] = ()
    """Further names by which the server may be addressed, as behind a proxy."""
    webrtc: bool = True
    """Answer offers of WebRTC, where aiortc is installed."""
    ice_servers: tuple[str, ...] = field(default=(), repr=False)
    """``stun:HOST[:PORT]`` or ``turn:NAME:PASSWORD@HOST[:PORT]``, for clients that reach the server through a NAT."""
    device: str = "auto"
    threads: int | None = None
    """CPU threads of the model; PyTorch's own choice by default."""
    max_sessions: int = 8
    idle_timeout: float = 300.0
    """A session whose client says nothing for so long is closed."""
    linger: float = 3.0
    """A session whose connection broke waits so long for its client to come back; nothing is generated meanwhile."""
    ping_interval: float = 2.0
    ping_timeout: float = 3.0
    """With ``linger``: a client that vanished without goodbye gives its slot free within 8 seconds."""
    send_timeout: float = 5.0
    """A client that takes no data for so long is gone."""
    chunk_timeout: float = 900.0
    """A worker that makes no chunk for so long (the first may compile) is replaced."""
    snapshot_every: int = 16
    """Chunks between the saved states from which sessions go on when the worker dies; 0 repeats all from the start."""
    warm_up: bool = True
    """Make one chunk before the first client comes: it measures what a session needs, and what is slow once is over."""
    max_message: int = 2**20
    max_image: int = 2**24
    max_image_pixels: int = 2**25
    """A photograph of a phone; decoded, it has 100 MB."""
    images_kept: int = 16
    messages_per_second: float = 200.0
    requests_per_second: float = 50.0
    max_jobs: int = 16
    """Videos that wait or are being made."""
    max_video_frames: int = 100_000
    keep_videos: float = 3600.0
    storage: int = 4 * 2**30
    """Of all videos together."""
    folder: Path | None = None
    """Where videos are kept; a private temporary folder by default, removed at the end."""
    shutdown_timeout: float = 10.0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def media_address(self) -> str | None:
        """The address at which WebRTC listens, that of the server; ``None``: all of this machine, for a server at all
        of them or at a name."""
        if self.host == "localhost":
            return "127.0.0.1"
        try:
            return None if ipaddress.ip_address(self.host).is_unspecified else self.host
        except ValueError:
            return None

    def ice(self) -> list[dict[str, str]]:
        """The ICE servers as browsers take them; UserError where one is not understood."""
        return [_ice_server(text) for text in self.ice_servers]

    def validate(self) -> None:
        """Raise :class:`UserError` where the settings cannot or must not be served."""
        self.ice()
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is {self.port}; expected a number from 0 (any free one) to 65535")
        if self.max_sessions < 1:
            raise UserError(f"--max-sessions is {self.max_sessions}; expected 1 or more")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads is {self.threads}; expected 1 or more")
        if self.idle_timeout <= 0:
            raise UserError(f"--idle-timeout is {self.idle_timeout:g}; expected seconds above 0")
        if self.token is not None and (len(self.token) < MIN_TOKEN or not self.token.isascii()):
            raise UserError(
                f"the token has {len(self.token)} characters; expected {MIN_TOKEN} or more of ASCII, such as "
                "`python -c 'import secrets; print(secrets.token_urlsafe(24))'` gives"
            )
        if not self.is_local and self.token is None:
            raise UserError(
                f"--host {self.host} lets other machines in, which needs a token: set {TOKEN_VARIABLE} (better than "
                "--token, which other users of this machine can see), or stay with --host 127.0.0.1"
            )


def _ice_server(text: str) -> dict[str, str]:
    if _STUN.fullmatch(text):
        return {"urls": text}
    match = _TURN.fullmatch(text)
    if match is None:  # what it says may be a password
        raise UserError(
            "--ice-server cannot be used as given; expected stun:HOST[:PORT], or "
            "turn:NAME:PASSWORD@HOST[:PORT][?transport=udp]"
        )
    return {"urls": match[1] + match[4], "username": match[2], "credential": match[3]}


def token_from_environment() -> str | None:
    """The token that the environment gives, if any."""
    return os.environ.get(TOKEN_VARIABLE) or None
