"""A server under clients that come, go and break: ``python tests/support/soak_serving.py --minutes 30 [--seed 0]``.

Clients connect, reset, change prompts and controls, leave or vanish, and now and then the worker is killed, all drawn
from the seed. Prints memory minute by minute and its slope; at the end no session may be left, and a fresh one has to
be the rollout made without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from typing import Any

import numpy as np
import torch

from flashdreams import load_pipeline
from flashdreams.client import AsyncSession, ServerError, Session
from load_serving import Serving, serving
from serving import PROMPT, until

PROMPTS = (PROMPT, "a green square moves left on a white background", "a yellow circle moves up on a black background")
CLIENTS = 4


class Soak:
    """What happened so far."""

    def __init__(self, server: Serving, seconds: float, seed: int, kill_every: float) -> None:
        self.server, self.end, self.random = server, time.monotonic() + seconds, random.Random(seed)
        self.kill_every = kill_every
        self.counts = dict.fromkeys(("sessions", "chunks", "resets", "prompts", "vanished", "refused", "kills"), 0)
        self.lost: list[str] = []
        self.memory: list[tuple[float, float, float]] = []

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    async def client(self, number: int) -> None:
        """Sessions, one after the other."""
        random_ = random.Random(f"{self.random.random()}-{number}")
        while not self.over:
            try:
                await self._session(random_)
                self.counts["sessions"] += 1
            except ServerError as error:
                self.counts["refused"] += 1
                if error.code != "busy":
                    self.lost.append(f"{error.code}: {error}")
                await asyncio.sleep(1.0)

    async def _session(self, random_: random.Random) -> None:
        length = random_.randrange(1, 30)
        options = {"seed": random_.randrange(2**32), "delivery": random_.choice(["live", "all"])}
        async with AsyncSession(self.server.url, random_.choice(PROMPTS), **options) as session:
            async for _ in session:
                self.counts["chunks"] += 1
                length -= 1
                draw = random_.random()
                if length == 0 or self.over:
                    if draw < 0.4:
                        session._socket.transport.abort()
                        self.counts["vanished"] += 1
                    return
                if draw < 0.05:
                    await session.reset(random_.choice([None, 7]))
                    self.counts["resets"] += 1
                elif draw < 0.15:
                    await session.set_prompt(random_.choice(PROMPTS))
                    self.counts["prompts"] += 1
                elif draw < 0.3:
                    await session.control(random_.choice(["left", "right", "w", None]))
            self.lost.append(f"ended: {session._talk.over}")

    async def kill(self) -> None:
        while not self.over:
            await asyncio.sleep(self.random.expovariate(1 / self.kill_every))
            if not self.over and (worker := self.server.worker):
                os.kill(worker, signal.SIGKILL)
                self.counts["kills"] += 1

    async def watch(self) -> None:
        begun = time.monotonic()
        while not self.over:
            self.memory.append((time.monotonic() - begun, *self.server.memory()))
            await asyncio.sleep(1.0)
            if len(self.memory) % 60 == 0:
                print(f"  {len(self.memory) // 60} min: MiB {self.memory[-1][1]:.0f}, {self.counts}", flush=True)

    def slope(self) -> float:
        """MiB a minute of the server, over the last three quarters."""
        late = np.array(self.memory[len(self.memory) // 4 :])
        return float(np.polyfit(late[:, 0] / 60, late[:, 1], 1)[0]) if len(late) > 2 else 0.0


def fresh_session_is_the_rollout(server: Serving, slug: str) -> bool:
    """Bit for bit, on as many threads as the server has: one."""
    torch.set_num_threads(1)
    with Session(server.url, PROMPT, seed=5, delivery="all", encoding="raw", num_chunk=4) as session:
        got = list(session)
    wanted = list(load_pipeline(slug, device="cpu").rollout(PROMPT, seed=5, num_chunk=4))
    return all(np.array_equal(a.frames, b.frames.numpy()) for a, b in zip(got, wanted, strict=True))


async def soak(run: Soak) -> None:
    await asyncio.gather(*(run.client(number) for number in range(CLIENTS)), run.kill(), run.watch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slug", nargs="?", default="tiny-world")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kill-every", type=float, default=20.0, help="seconds from death to death of the worker, on average"
    )
    options: Any = parser.parse_args()
    with serving(options.slug, "--threads", "1", "--max-sessions", str(CLIENTS)) as server:
        run = Soak(server, 60 * options.minutes, options.seed, options.kill_every)
        asyncio.run(soak(run))
        until(lambda: server.here.metric("sessions") == 0, 30)
        print(f"{options.minutes:g} min: {run.counts}, lost {run.lost or 'none'}; no session is left")
        print(f"MiB of the server {run.memory[0][1]:.0f} -> {run.memory[-1][1]:.0f}, {run.slope():+.2f} a minute")
        same = fresh_session_is_the_rollout(server, options.slug)
        print(f"a fresh session is {'' if same else 'NOT '}the rollout without a server, bit for bit")
    raise SystemExit(not same or bool(run.lost))


if __name__ == "__main__":
    main()
