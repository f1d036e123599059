"""The published checkpoints: every key has its place, and what a checkpoint of the base model lacks."""

from __future__ import annotations

import pytest
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.loading import candidates
from flashdreams.recipes.wan.config import WanTransformerConfig
from lingbot.config import LINGBOT_CONFIGS
from member import assert_full_bijection, header, manifest, module_keys, sources_by_target

pytestmark = pytest.mark.ci_cpu


def transformers(slug: str) -> list[TransformerConfig]:
    """That of low noise, then that of high noise if there is one."""
    model = LINGBOT_CONFIGS[slug].pipeline.diffusion_model
    return [model.transformer, *(expert.transformer for expert in model.high_noise)]


CHECKPOINTS = [
    ("lingbot-world-cam", 0, "lingbot-world-base.low_noise_model.native"),
    ("lingbot-world-cam", 1, "lingbot-world-base.high_noise_model.native"),
    ("lingbot-world-cam", 0, "lingbot-world-cam.native"),
    ("lingbot-world-act", 0, "lingbot-world-act.native"),
    ("lingbot-world-act", 1, "lingbot-world-act.native"),
    ("lingbot-world-fast", 0, "lingbot-world-v2-14b-causal-fast.native"),
    ("lingbot-world-fast-v1", 0, "lingbot-world-cam.native"),
]


def plain(config: TransformerConfig) -> TransformerConfig:
    """With the fields that say nothing of its tensors alike, so that a model of full size is built once."""
    network = derive_config(config.network, keep_injections=True)
    return WanTransformerConfig(network=network, transforms=config.transforms)


@pytest.mark.parametrize(("slug", "expert", "name"), sorted(CHECKPOINTS, key=lambda row: "act" in row[2]))
def test_the_remap_is_full_bijection(slug: str, expert: int, name: str) -> None:
    """Every tensor of the file, the camera's too, becomes one of the model's, and none of those is left."""
    checkpoint = header(name)
    assert len(checkpoint) == manifest(name)["n_tensors"] == 1421
    assert_full_bijection(plain(transformers(slug)[expert]), checkpoint)


@pytest.mark.parametrize(
    ("slug", "name", "key", "shape"),
    [
        ("lingbot-world-cam", "lingbot-world-cam.native", "patch_embedding_wancamctrl.weight", [5120, 1536]),
        ("lingbot-world-cam", "lingbot-world-cam.native", "blocks.39.cam_shift_layer.bias", [5120]),
        ("lingbot-world-act", "lingbot-world-act.native", "patch_embedding_wancamctrl.weight", [5120, 1792]),
    ],
)
def test_the_remap_spot_checks_real_keys(slug: str, name: str, key: str, shape: list[int]) -> None:
    assert sources_by_target(plain(transformers(slug)[0]), header(name))[key] == (key,)
    assert manifest(name)["tensors"][key]["shape"] == shape


@pytest.mark.parametrize("name", ["wan2.2-i2v-a14b.high_noise_model.native", "wan2.2-i2v-a14b.transformer_2.diffusers"])
def test_a_checkpoint_of_the_base_model_lacks_exactly_what_is_allowed(name: str) -> None:
    config = transformers("lingbot-world-cam")[0]
    absent = (
        manifest("lingbot-world-cam.native")["tensors"].keys()
        - manifest("wan2.2-i2v-a14b.high_noise_model.native")["tensors"].keys()
    )
    assert len(absent) == 326
    with_permission = derive_config(plain(config), allow_missing=config.allow_missing)
    made = sources_by_made(with_permission, header(name))
    assert made.keys() == manifest("wan2.2-i2v-a14b.high_noise_model.native")["tensors"].keys()
    assert sources_by_made(with_permission, header("lingbot-world-cam.native")).keys() == made.keys() | absent


def sources_by_made(config: TransformerConfig, checkpoint: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """What loading makes of a checkpoint that may lack what the config allows."""
    wanted = module_keys(plain(config))
    _, steps, match = choose_transform(wanted, checkpoint, candidates(config), allow_missing=config.allow_missing)
    assert match.ok and not match.idle, match
    return {step.target: step.sources for step in steps}


def test_the_model_of_the_other_kind_does_not_fit() -> None:
    with pytest.raises(AssertionError):
        assert_full_bijection(plain(transformers("lingbot-world-act")[0]), header("lingbot-world-cam.native"))
