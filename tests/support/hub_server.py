"""A stand-in for the model hub: the endpoints that downloads use, on this machine, with the faults of real networks."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves ``files`` of one repository, ``org/model``, at ``main``.

    Faults: ``status`` answers every request with that code (and ``error_code``); ``drop_after`` ends the next body
    after so many bytes, and ``stall_after`` sends no more after so many until ``resume`` is set; ``corrupt`` bodies
    have one bit turned; ``ranges`` off ignores Range headers; ``token`` is needed to see anything.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    status: int | None = None
    error_code: str | None = None
    retry_after: str | None = None
    token: str | None = None
    drop_after: int | None = None
    stall_after: int | None = None
    corrupt: int = 0
    ranges: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    resume: threading.Event = field(default_factory=threading.Event)
    sent: int = 0
    """Bytes of file bodies that went out."""
    log: list[tuple[str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def bodies(self, name: str) -> list[str | None]:
        """The Range header of each GET of ``name``."""
        return [span for method, path, span in self.log if method == "GET" and path.endswith("/" + name)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.owner, unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, self.headers.get("Range")))
        if hub.status is not None:
            return self._fail(hub.status, hub.error_code)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._fail(401, "RepoNotFound")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            if parts[2:4] != ["org", "model"]:
                return self._fail(404, "RepoNotFound")
            if parts[5] not in ("main", COMMIT):
                return self._fail(404, "RevisionNotFound")
            return self._json()
        name = "/".join(parts[4:])
        if name not in hub.files:
            return self._fail(404, "EntryNotFound")
        return self._file(name, hub.files[name])

    def _json(self) -> None:
        siblings = []
        for name, data in self.owner.files.items():
            size = self.owner.sizes.get(name, len(data))
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 135}
            siblings.append({"rfilename": name, "size": size} | ({} if name.endswith(".json") else {"lfs": lfs}))
        body = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _file(self, name: str, data: bytes) -> None:
        hub, start, stop, code = self.owner, 0, len(data), 200
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        span = self.headers.get("Range")
        if span and hub.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop, code = int(first), min(int(last) + 1 if last else stop, stop), 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._head(code, headers | {"Content-Length": str(stop - start)})
        if self.command == "HEAD":
            return
        if hub.corrupt:
            hub.corrupt -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        if hub.drop_after is not None:
            cut, hub.drop_after = start + hub.drop_after, None
            self._send(data[start : min(cut, stop)])
            self.close_connection = True
            return
        if hub.stall_after is not None:
            cut, hub.stall_after = start + hub.stall_after, None
            self._send(data[start:cut])
            self.wfile.flush()
            hub.resume.wait(30)
            self.close_connection = True
            return
        self._send(data[start:stop])

    def _send(self, data: bytes) -> None:
        self.owner.sent += len(data)
        self.wfile.write(data)

    def _head(self, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _fail(self, code: int, error: str | None) -> None:
        headers = {"Content-Length": "0", "X-Repo-Commit": COMMIT}
        if error:
            headers["X-Error-Code"] = error
        if self.owner.retry_after is not None:
            headers["Retry-After"] = self.owner.retry_after
        self._head(code, headers)
