"""The kinds of golden files that can be run. Each module has ``matches(golden)`` and ``run(golden)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from cases import (
    block_causal,
    clip,
    cosmos,
    few_step,
    flashvsr,
    flow_euler,
    lingbot,
    matrix_game,
    multistep,
    self_forcing,
    taehv,
    transitions,
    two_experts,
    umt5,
    wan_network,
    wan_vae,
)
from golden import Golden

Run = Callable[[Golden], Iterator[tuple[str, Tensor]]]

CASES = (
    wan_network,
    wan_vae,
    self_forcing,
    block_causal,
    two_experts,
    few_step,
    flow_euler,
    multistep,
    transitions,
    taehv,
    umt5,
    clip,
    cosmos,
    matrix_game,
    flashvsr,
    lingbot,
)


def find(golden: Golden) -> Run:
    """The function that yields ``(output, tensor)`` for every output of a golden file.

    Raises:
        LookupError: no case matches.
    """
    for case in CASES:
        if case.matches(golden):
            return case.run
    raise LookupError(
        f"no case for {golden.repository} {', '.join(golden.files)} with model_type "
        f"{golden.config.get('model_type', '(none)')}; add one to tests/goldens/cases"
    )
