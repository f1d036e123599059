"""``flashdreams serve``: a model for people, in their browsers, and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import get_runner
from flashdreams.scripts.console import Parser
from flashdreams.serving.config import TOKEN_VARIABLE, ServeConfig, token_from_environment


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams serve SLUG ...``."""
    base = ServeConfig()
    parser = Parser(
        prog=program,
        description="Serve a model: a page to steer it, sessions over WebSocket and WebRTC, videos over HTTP.",
    )
    parser.add_argument("slug", metavar="SLUG", help="the model (see `flashdreams list`)")
    parser.add_argument("--host", default=base.host, help=f"address to listen at [{base.host}: this machine alone]")
    parser.add_argument("--port", type=int, default=base.port, metavar="N", help=f"[{base.port}]; 0 takes a free one")
    parser.add_argument("--token", help=f"what clients must know; better given as {TOKEN_VARIABLE}")
    parser.add_argument("--allow-origin", action="append", default=[], metavar="URL", help="a page elsewhere")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="another name of the server")
    parser.add_argument(
        "--max-sessions", type=int, default=base.max_sessions, metavar="N", help=f"[{base.max_sessions}]"
    )
    parser.add_argument("--idle-timeout", type=float, default=base.idle_timeout, metavar="SECONDS",
                        help=f"close a session whose client says nothing [{base.idle_timeout:g}]")  # fmt: skip
    parser.add_argument("--snapshot-every", type=int, default=base.snapshot_every, metavar="CHUNKS",
                        help=f"most that is repeated when the worker dies [{base.snapshot_every}]")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="keep videos here [a temporary folder, removed at the end]")
    parser.add_argument("--no-webrtc", action="store_true", help="send pictures over WebSocket alone")
    parser.add_argument("--ice-server", action="append", default=[], metavar="URL",
                        help="stun:HOST or turn:NAME:PASSWORD@HOST, to get through a NAT")  # fmt: skip
    parser.add_argument("--device", default=base.device, help="auto, cpu, cuda, cuda:0, mps [auto]")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the model [PyTorch's choice]")
    parser.add_argument("--no-warm-up", action="store_true", help="be ready without having made a first chunk")
    try:
        options = parser.parse_args(list(words))
    except SystemExit:  # how argparse ends after a help page
        return 0
    config = ServeConfig(
        host=options.host, port=options.port, token=options.token or token_from_environment(),
        allow_origins=tuple(options.allow_origin), allow_hosts=tuple(options.allow_host),
        max_sessions=options.max_sessions, idle_timeout=options.idle_timeout, snapshot_every=options.snapshot_every,
        folder=options.folder, device=options.device, threads=options.threads, warm_up=not options.no_warm_up,
        webrtc=not options.no_webrtc, ice_servers=tuple(options.ice_server),
    )  # fmt: skip
    runner = get_runner(options.slug)
    config.validate()
    try:
        from flashdreams.serving.server import serve
    except ImportError as error:
        raise UserError(
            f"serving needs the package {error.name!r}; install it with: pip install 'flashdreams[serve]'"
        ) from None
    serve(config, runner)
    return 0
