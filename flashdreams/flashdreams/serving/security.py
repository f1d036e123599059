"""Who may ask, how often and how much: one layer before everything else. Nothing secret is ever logged."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from flashdreams.serving.config import ServeConfig
from flashdreams.serving.metrics import Metrics

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
OPEN_PATHS = ("/", "/healthz", "/readyz", "/favicon.ico")
"""What load balancers and browsers ask without a token: the page, which has no secrets, asks the person for it."""
OPEN_FOLDER = "/static/"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
BEARER = "bearer."
"""Prefix of the WebSocket subprotocol that carries the token, base64url without padding: pages cannot set headers."""
MAX_JSON_BODY = 2**21
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class RateLimit:
    """A bucket of tokens per client: ``per_second`` on the long run, twice as many at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second = per_second
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def allow(self, client: str) -> bool:
        """Whether ``client`` may do one more thing now."""
        now = self._clock()
        if len(self._buckets) > 10_000:  # those that are full again say nothing
            self._buckets = {key: at for key, at in self._buckets.items() if now - at[1] < 2.0}
        tokens, last = self._buckets.get(client, (2 * self.per_second, now))
        tokens = min(2 * self.per_second, tokens + (now - last) * self.per_second)
        self._buckets[client] = (tokens - 1 if tokens >= 1 else tokens), now
        return tokens >= 1


class Guard:
    """ASGI layer that lets through only what may pass."""

    def __init__(self, app: Any, config: ServeConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics
        self._rate = RateLimit(config.requests_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            self._metrics.denied += 1
            await _refuse(scope, receive, send, *refusal)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        limit = self._config.max_image if scope["path"] == "/v1/images" else MAX_JSON_BODY
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            await _refuse(scope, receive, send, 413, f"the body has {length[:20]} bytes; at most {limit} are taken")
            return
        await self._app(scope, _limited(receive, limit), _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._known_host(host):
            return 421, f"this server is not {host[:80]!r}; use its own address (or --allow-host)"
        origin = headers.get("origin")
        if origin is not None and not self._known_origin(origin, host):
            return 403, f"pages of {origin[:80]!r} may not use this server (--allow-origin)"
        client = scope.get("client")
        if not self._rate.allow(client[0] if client else ""):
            return 429, f"more than {self._rate.per_second:g} requests a second; ask less often"
        if self._config.token is None or _is_open(scope["path"]):
            return None
        if not hmac.compare_digest(_given_token(scope, headers).encode(), self._config.token.encode()):
            return 401, "a token is needed: the header Authorization: Bearer ..., or the WebSocket subprotocol"
        return None

    def _known_host(self, host: str) -> bool:
        """Against DNS rebinding: a page elsewhere whose name was pointed at this machine."""
        name = (urlsplit(f"//{host}").hostname or "") if host.isprintable() else ""
        return not self._config.is_local or name in (*LOCAL_NAMES, self._config.host, *self._config.allow_hosts)

    def _known_origin(self, origin: str, host: str) -> bool:
        try:
            same = urlsplit(origin).netloc == host and urlsplit(origin).scheme in ("http", "https")
        except ValueError:
            return False
        return same or origin in self._config.allow_origins


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _given_token(scope: Scope, headers: dict[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    for offered in scope.get("subprotocols", ()):
        if offered.startswith(BEARER):
            return decode_token(offered.removeprefix(BEARER))
    return ""


def encode_token(token: str) -> str:
    """A token as a subprotocol may hold it."""
    return base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def decode_token(text: str) -> str:
    """What :func:`encode_token` wrote; nothing if it is none."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError):
        return ""


def _limited(receive: Receive, limit: int) -> Receive:
    """A body without its length in front cannot grow beyond the limit either."""
    got = 0

    async def next_part() -> Any:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > limit:
            return {"type": "http.disconnect"}
        return message

    return next_part


def _with_headers(send: Send) -> Send:
    async def send_with(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return send_with


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"code": _CODES[status], "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": _CODES[status]})
            return
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


_CODES = {401: "unauthorized", 403: "forbidden", 413: "too_large", 421: "wrong_host", 429: "rate"}
