"""LingBot-World: camera conditioning, the network with and without it, and the rollout of causal-fast.

The plugin is imported when a file of its is run, so that all other files can be run where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from golden import Golden


def matches(golden: Golden) -> bool:
    return "lingbot-world" in golden.repository or any("lingbotworld2" in file for file in golden.files)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    from cases import lingbot_camera, lingbot_network

    if "noise" in golden.inputs:
        return lingbot_network.rollout(golden)
    return lingbot_network.forward(golden) if golden.weights else lingbot_camera.conditioning(golden)
