"""Cosmos-Predict2.5: one forward pass, with the numbers of the original and of diffusers.

The plugin is imported when a file of its is run, so that all other files can be run where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from golden import Golden


def matches(golden: Golden) -> bool:
    return "nvidia-cosmos/cosmos-predict2.5" in golden.repository


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    from cases import cosmos_network

    return cosmos_network.velocities(golden)
