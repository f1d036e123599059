"""The post-processors of a run of the command line: ``--postprocess NAME``, several in their order."""

from __future__ import annotations

from collections.abc import Sequence

from flashdreams.infra.postprocess.config import ChainConfig
from flashdreams.plugins.registry import get_postprocessor


def postprocessors(names: Sequence[str]) -> ChainConfig:
    """The post-processors of these names, one after another.

    Raises:
        PluginError: there is none of a name (with the nearest ones), or its plugin cannot be used.
        ConfigError: one is misconfigured.
    """
    chain = ChainConfig(stages=tuple(map(get_postprocessor, names)))
    chain.validate_tree()
    return chain
