"""The comparison with the original, on made-up frames; running it needs a GPU and the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from wan22.config import WAN22_CONFIGS

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wan22_parity_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_knows_every_model_with_our_settings(script: ModuleType) -> None:
    assert script.MODELS.keys() == WAN22_CONFIGS.keys()
    for slug, (_, _, (width, height), *_, steps, shift, _guidance) in script.MODELS.items():
        pipeline = WAN22_CONFIGS[slug].pipeline
        scheduler = pipeline.diffusion_model.scheduler
        assert (pipeline.width, pipeline.height, scheduler.num_steps, scheduler.shift) == (width, height, steps, shift)


def test_local_files_take_the_place_of_the_hubs(script: ModuleType) -> None:
    def sources(config) -> list[str]:
        from flashdreams.config import nested_configs

        own = [config.checkpoint_path] if getattr(config, "checkpoint_path", None) else []
        return own + [source for child in nested_configs(config) for source in sources(child)]

    for runner in WAN22_CONFIGS.values():
        before, after = sources(runner), sources(script.parity.with_local_files(runner, Path("folder")))
        assert len(before) == len(after) >= 3
        for one, other in zip(before, after, strict=True):
            assert Path(other) == Path("folder", *one.removeprefix("hf://").split("/")[2:])


def test_the_command_line_says_what_is_missing(script: ModuleType, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["original", "--repo", str(tmp_path)])
    assert "--checkpoints" in capsys.readouterr().err
