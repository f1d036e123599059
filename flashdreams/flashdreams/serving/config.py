"""What a server is told, and its limits. Imports neither torch nor the web framework."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from flashdreams.infra.errors import UserError

TOKEN_VARIABLE = "FLASHDREAMS_TOKEN"
MIN_TOKEN = 16
"""Characters; a token that can be guessed protects nothing."""


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

    def validate(self) -> None:
        """Raise :class:`UserError` where the settings cannot or must not be served."""
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


def token_from_environment() -> str | None:
    """The token that the environment gives, if any."""
    return os.environ.get(TOKEN_VARIABLE) or None
