"""Transition kernels in float64, a table of steps: means, standard deviations, drawn samples, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashdreams.infra.scheduler.kernels import Kernel
from flashdreams.infra.scheduler.transitions import Transition, transition
from golden import Golden

NAMES = {"ode": "ode", "flow": "flow_sde", "dance": "dance_sde", "cps": "cps", "flash": "flash_sde"}


def matches(golden: Golden) -> bool:
    return set(golden.config.get("kinds", ())) == set(NAMES)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    for kind in golden.config["kinds"]:
        rows = [step(golden, kind, row) for row in range(golden.config["rows"])]
        yield f"{kind}.mean", torch.cat([whole.mean for whole, _ in rows])
        yield f"{kind}.next", torch.cat([whole.next for whole, _ in rows])
        yield f"{kind}.std", torch.tensor([whole.std for whole, _ in rows], dtype=torch.float64)
        yield f"{kind}.valid", torch.tensor([whole.log_prob is not None for whole, _ in rows], dtype=torch.uint8)
        yield f"{kind}.logprob_mean", torch.cat([score(whole) for whole, _ in rows])
        yield f"{kind}.logprob_elementwise", torch.stack([score(single) for _, single in rows])
        if kind == "cps":
            published = [step(golden, kind, row, score="surrogate")[0] for row in range(golden.config["rows"])]
            yield "cps.surrogate_mean", torch.cat([score(whole) for whole in published])


def step(golden: Golden, kind: str, row: int, **options) -> tuple[Transition, Transition]:
    """The row as one sample, and each of its elements as a sample of its own."""
    given = {name: tensor[row] for name, tensor in golden.inputs.items()}
    kernel = Kernel(
        NAMES[kind],
        eta=min(given["eta"].item(), 1.0) if kind == "cps" else given["eta"].item(),
        sigma_cap=given["sigma_cap"].item(),
        sigma_min=given["flash_sigma_min"].item(),
        sigma_max=given["flash_sigma_max"].item(),
    )
    levels = given["sigma"].item(), given["sigma_next"].item()
    x, flow, noise = given["x"], given["v"], given["z"]
    whole = transition(kernel, x[None], flow[None], *levels, noise=noise[None], **options)
    return whole, transition(kernel, x[:, None], flow[:, None], *levels, noise=noise[:, None], **options)


def score(result: Transition) -> Tensor:
    """Its log-probabilities; 0, as stored, where there are none."""
    return torch.zeros(len(result.mean), dtype=torch.float64) if result.log_prob is None else result.log_prob
