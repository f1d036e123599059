"""Weights of a run of the command line: any form of source, LoRAs, the record of what was loaded, and
weights that make no picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save, save_file

from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.core.checkpoint.digest import hash_file
from flashdreams.core.media.video import read_video_frames
from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.lora_flag import LoraChoice, parse_loras
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.runner import Runner
from flashdreams.recipes.template.config import RUNNER_TEMPLATE
from flashdreams.recipes.template.modules import TemplateCodec
from hub_server import FakeHub
from small_model import save_shards
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path_factory.mktemp("cache")))
    notices.reset()


@pytest.fixture(scope="module")
def state():
    return {
        key: value.clone()
        for key, value in template_pipeline().diffusion_model.transformer.network.state_dict().items()
    }


@pytest.fixture
def weights(tmp_path, state) -> Path:
    save_file(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def lora(path: Path, layer: str = "blocks.0.self_attn.v", **more: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(4, 48, generator=generator), torch.randn(48, 4, generator=generator)
    save_file({f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up, **more}, path)
    return path


def runner(tmp_path: Path, **fields) -> Runner:
    fields = {"output": tmp_path / "out" / "a.mp4", "num_chunk": 2, "seed": 1, **fields}
    return Runner(derive_config(RUNNER_TEMPLATE, **fields))


def run(tmp_path: Path, **fields):
    """Frames and record."""
    path = runner(tmp_path, **fields).run()
    return read_video_frames(path), json.loads(path.with_suffix(".json").read_text())


def test_every_form_of_source_is_looked_into_before_anything_is_loaded(tmp_path, weights, state, monkeypatch):
    torch.save({"generator_ema": state}, tmp_path / "dump.pt")
    (tmp_path / "shards").mkdir()
    save_shards(tmp_path / "shards", state, 3)
    sources = [weights, tmp_path / "dump.pt", tmp_path / "shards", tmp_path / "shards" / "model.safetensors.index.json"]
    with FakeHub({"model.safetensors": save(state | {"surplus": torch.zeros(500_000)})}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for source in [*map(str, sources), "org/model", "hf://org/model/model.safetensors@main", "random:3"]:
            assert runner(tmp_path, ckpt_path=source).plan()
        assert set(hub.bodies("model.safetensors")) == {"bytes=0-1023", "bytes=0-1048575"}, (
            "more than headers travelled"
        )
        with pytest.raises(UserError, match="org/model has no other.safetensors"):
            runner(tmp_path, ckpt_path="hf://org/model/other.safetensors").plan()
    (tmp_path / "shards" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="names 3 shards, of which 1 are not there"):
        runner(tmp_path, ckpt_path=str(tmp_path / "shards")).plan()


def test_the_record_names_every_file_that_was_loaded(tmp_path, weights, state):
    (tmp_path / "shards").mkdir()
    files = save_shards(tmp_path / "shards", state, 2)
    added = lora(tmp_path / "style.safetensors")
    _, record = run(tmp_path, ckpt_path=str(tmp_path / "shards"), lora=(f"{added}:0.5",))
    assert record["files"] == {"diffusion_model.experts.0": {path.name: f"sha256:{hash_file(path)}" for path in files}}
    assert record["loras"] == {
        "style.0": {"source": str(added), "weight": 0.5, "layers": 1, "digest": f"sha256:{hash_file(added)}"}
    }
    assert record["checkpoint"]["lora.style.0"] == f"sha256:{hash_file(added)}"
    assert record["checkpoint"]["transformer.0"].startswith("sha256:")
    assert record["config"]["lora"] == [f"{added}:0.5"]


def test_a_file_that_changed_during_the_run_is_not_given_a_digest_it_had_not(tmp_path, weights, state, monkeypatch):
    made = Rollout.__next__

    def exchange(rollout):
        weights.unlink(missing_ok=True)
        save_file({key: value + 1 for key, value in state.items()}, weights)
        return made(rollout)

    monkeypatch.setattr(Rollout, "__next__", exchange)
    _, record = run(tmp_path, ckpt_path=str(weights))
    assert record["files"]["diffusion_model.experts.0"] == {"weights.safetensors": "changed since it was loaded"}


def test_a_lora_changes_the_video_by_its_weight(tmp_path, weights):
    path = lora(tmp_path / "style.safetensors")
    plain, _ = run(tmp_path, ckpt_path=str(weights))
    none, _ = run(tmp_path, ckpt_path=str(weights), lora=(f"{path}:0",))
    half, _ = run(tmp_path, ckpt_path=str(weights), lora=(f"{path}:0.5",))
    twice, _ = run(tmp_path, ckpt_path=str(weights), lora=(f"{path}:0.25", f"{path}:0.25"))
    assert (plain == none).all() and (plain != half).any()
    assert (abs(half.astype(int) - twice) <= 3).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: lora(path, "blocks.7.self_attn.v"), r"does not fit this model: matched 0/1 layers.*nearest"),
        (lambda path: lora(path, **{f"text.q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}), "matched 1/2"),
        (lambda path: lora(path, **{"x.dora_scale": torch.ones(1)}), "is a DoRA"),
        (lambda path: path, "no checkpoint at .*style.safetensors"),
    ],
)  # fmt: skip
def test_a_lora_that_does_not_fit_in_full_is_refused_before_loading(tmp_path, weights, monkeypatch, make, message):
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("weights were loaded before the refusal"))
    path = make(tmp_path / "style.safetensors")
    with pytest.raises(UserError, match=r"(?s)" + message):
        runner(tmp_path, ckpt_path=str(weights), lora=(str(path),)).run()
    assert not (tmp_path / "out").exists()


def test_how_a_lora_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lora(tmp_path / "odd:1.safetensors")
    texts = [
        "a.safetensors",
        "d/a.safetensors:0.5",
        "hf://o/r/b.safetensors@main:-1",
        "org/repo:2:1",
        "odd:1.safetensors",
    ]
    assert parse_loras(texts) == (
        LoraChoice("a", "a.safetensors", 1.0),
        LoraChoice("a-2", "d/a.safetensors", 0.5),
        LoraChoice("b", "hf://o/r/b.safetensors@main", -1.0),
        LoraChoice("repo", "org/repo", 2.0, 1),
        LoraChoice("odd:1", "odd:1.safetensors", 1.0),
    )
    for text in ("a.safetensors:nan", "a.safetensors:much", "a.safetensors:"):
        with pytest.raises(UserError, match=r"expected SOURCE or SOURCE:WEIGHT"):
            parse_loras([text])


def test_a_model_of_several_experts_must_be_told_which_one(tmp_path, weights):
    path = lora(tmp_path / "style.safetensors")
    transformer = RUNNER_TEMPLATE.pipeline.diffusion_model.transformer
    model = derive_config(
        RUNNER_TEMPLATE.pipeline.diffusion_model, high_noise=(ExpertConfig(sigma_low=0.8, transformer=transformer),)
    )
    config = derive_config(RUNNER_TEMPLATE, pipeline=derive_config(RUNNER_TEMPLATE.pipeline, diffusion_model=model))
    fields = {"output": tmp_path / "a.mp4", "num_chunk": 1, "seed": 1}
    with pytest.raises(UserError, match="template has 2 experts; say which one .*style.safetensors is for"):
        Runner(derive_config(config, lora=(str(path),), **fields)).plan()
    with pytest.raises(UserError, match="is for expert 2; there are 2, from 0"):
        Runner(derive_config(config, lora=(f"{path}:1:2",), **fields)).plan()
    assert Runner(derive_config(config, lora=(f"{path}:1:1",), **fields)).plan().loras[0].expert == 1


def test_weights_that_are_no_numbers_stop_the_run_by_key(tmp_path, weights, state):
    broken = state | {"blocks.1.ffn.0.weight": torch.full_like(state["blocks.1.ffn.0.weight"], torch.nan)}
    save_file(broken, weights)
    with pytest.raises(
        UserError, match=r"blocks\.1\.ffn\.0\.weight has \d+ of \d+ values that are NaN or infinite: the file"
    ):
        runner(tmp_path, ckpt_path=str(weights)).run()
    assert not list((tmp_path / "out").glob("*"))


def test_a_first_chunk_that_is_no_number_says_what_to_check(tmp_path, weights, state):
    """Finite weights that overflow."""
    save_file(state | {"head.head.weight": torch.full_like(state["head.head.weight"], 3e38)}, weights)
    with pytest.raises(UserError, match=r"chunk 0 holds NaN or infinity: .*flashdreams checkpoint verify"):
        runner(tmp_path, ckpt_path=str(weights)).run()
    assert not list((tmp_path / "out").glob("*"))


def test_a_first_chunk_of_one_colour_says_what_to_check(tmp_path, monkeypatch):
    monkeypatch.setattr(TemplateCodec, "decode", lambda *_: torch.full((1, 3, 1, 32, 48), 0.2))
    with pytest.raises(UserError, match="every pixel of the first chunk is the same.*flashdreams checkpoint verify"):
        runner(tmp_path).run()
    assert not list((tmp_path / "out").glob("*"))


def test_a_later_chunk_that_is_no_number_stops_the_run_and_keeps_what_was_made(tmp_path, monkeypatch):
    made = Rollout.__next__

    def fail_at_two(rollout):
        chunk = made(rollout)
        if chunk.index == 2:
            chunk.latent[..., 0, 0] = torch.nan
        return chunk

    monkeypatch.setattr(Rollout, "__next__", fail_at_two)
    with pytest.raises(UserError, match="chunk 2 holds NaN or infinity"):
        runner(tmp_path, num_chunk=5).run()
    assert len(read_video_frames(tmp_path / "out" / "a.mp4")) == 9
    record = json.loads((tmp_path / "out" / "a.json").read_text())
    assert record["output"]["interrupted"] and record["output"]["frames"] == 9
