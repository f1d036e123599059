"""Matrix-Game-2: the action module alone, and the whole network.

The plugin is imported when a file of its is run, so that all other files can be run where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from golden import Golden


def matches(golden: Golden) -> bool:
    return "Matrix-Game" in golden.repository


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    from cases import matrix_game_stream

    of = matrix_game_stream.of_module if "action_module" in golden.weights else matrix_game_stream.of_network
    return of(golden)
