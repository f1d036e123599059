"""What live sessions get of one server: ``python tests/support/load_serving.py --sessions 4 --seconds 120``.

Prints frames a second of all together, how fairly they share, memory of server and worker, sessions that were lost, and
how one session too many is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdreams.client import AsyncSession, ServerError
from flashdreams.serving.metrics import resident_bytes
from serving import PROMPT, Running, until

PROGRAM = "import sys; from flashdreams.scripts.main import main; sys.exit(main())"


@dataclass
class Serving:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def __post_init__(self) -> None:
        self.here = Running(None, None, int(self.url.rpartition(":")[2]))  # type: ignore[arg-type]

    @property
    def worker(self) -> int:
        """The process that computes: the server's largest child."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
        return max(children, key=resident_bytes, default=0)

    def memory(self) -> tuple[float, float]:
        """MiB of server and worker."""
        return resident_bytes(self.process.pid) / 2**20, resident_bytes(self.worker) / 2**20


@contextmanager
def serving(slug: str, *words: str) -> Generator[Serving]:
    """``flashdreams serve`` until the block ends, ready for clients."""
    command = [sys.executable, "-c", PROGRAM, "serve", slug, "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        server = Serving(process, process.stdout.readline().split(" at ")[1].split()[0])
        until(lambda: server.here.request("/readyz")[0] == 200, 600)
        yield server
    finally:
        process.terminate()
        process.wait(60)


async def follow(url: str, seed: int, seconds: float, encoding: str) -> tuple[int, bool]:
    """Frames that one session gets, and whether it lives to the end."""
    frames, end = 0, time.monotonic() + seconds
    async with AsyncSession(url, PROMPT, seed=seed, encoding=encoding) as session:
        async for chunk in session:
            frames += len(chunk.frames)
            if time.monotonic() > end:
                return frames, True
    return frames, False


async def one_too_many(url: str, after: float) -> str:
    await asyncio.sleep(after)
    try:
        async with AsyncSession(url, PROMPT):
            return "was let in"
    except ServerError as error:
        return f"{error.code}: {error}"


async def load(server: Serving, sessions: int, seconds: float, encoding: str) -> None:
    before = server.memory()
    refusal = asyncio.create_task(one_too_many(server.url, seconds / 2))
    got = await asyncio.gather(
        *(follow(server.url, seed, seconds, encoding) for seed in range(sessions)), return_exceptions=True
    )
    after = server.memory()
    lived = [frames for each in got if not isinstance(each, BaseException) for frames, alive in [each] if alive]
    rates = [frames / seconds for frames in lived] or [0.0]
    print(f"{sessions} sessions, {seconds:g} s, {encoding}: {sum(rates):.2f} FPS together, fairness (min/max) "
          f"{min(rates) / max(max(rates), 1e-9):.3f}, {sessions - len(lived)} lost")  # fmt: skip
    print(f"  MiB of server {before[0]:.0f} -> {after[0]:.0f}, of worker {before[1]:.0f} -> {after[1]:.0f}")
    print(f"  one more session: {await refusal}")
    for error in (each for each in got if isinstance(each, BaseException)):
        print(f"  lost: {error!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slug", nargs="?", default="tiny-world")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--encoding", choices=["raw", "jpeg"], default="jpeg")
    parser.add_argument("--threads", type=int, default=2)
    options: Any = parser.parse_args()
    for count in options.sessions:
        with serving(options.slug, "--max-sessions", str(count), "--threads", str(options.threads)) as server:
            asyncio.run(load(server, count, options.seconds, options.encoding))


if __name__ == "__main__":
    main()
