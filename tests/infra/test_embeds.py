"""Embeddings of prompts in files, and runs that save them or take them in place of a text encoder."""

from __future__ import annotations

import json
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.media.video import read_video_frames
from flashdreams.infra import loading
from flashdreams.infra.config import ExpertConfig, PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import with_checkpoints_from
from flashdreams.infra.prompts import GivenPrompts, load_embeds, save_embeds
from flashdreams.infra.record import file_digest
from flashdreams.infra.runner import Runner
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE
from flashdreams.recipes.template.modules import TemplateTextEncoder
from flashdreams.recipes.wan import text_encoder
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from small_umt5 import SMALL, Letters, random_encoder

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path_factory.mktemp("cache")))
    notices.reset()


def model(**transformer: object) -> PipelineConfig:
    """The template, whose network takes 8 tokens of 16."""
    return derive_config(PIPELINE_TEMPLATE, diffusion_model={"transformer": transformer})


def test_saved_embeddings_come_back_bit_for_bit(tmp_path):
    text = torch.randn(1, 8, 16).to(torch.bfloat16)
    text[:, 5:] = 0
    negative = torch.zeros(8, 16)
    save_embeds(tmp_path / "new" / "e.safetensors", text, negative)
    got = load_embeds(tmp_path / "new" / "e.safetensors", model(guidance_scale=2.0))
    assert torch.equal(got["text"], text) and got["text"].dtype == torch.bfloat16
    assert torch.equal(got["negative_text"], negative[None])
    with safe_open(tmp_path / "new" / "e.safetensors", "pt") as file:
        assert file.get_tensor("text").shape == (5, 16)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["e.safetensors"]
    with pytest.raises(CheckpointError, match=r"'text' has shape \[2, 8, 16\]"):
        save_embeds(tmp_path / "e.safetensors", torch.ones(2, 8, 16))


@pytest.mark.parametrize("content", [torch.ones(1, 5, 16), torch.ones(5, 16), {"text": torch.ones(5, 16)}])
@pytest.mark.parametrize("old", [False, True])
def test_a_tensor_of_torch_save_is_the_text(tmp_path, content, old):
    torch.save(content, tmp_path / "e.pt", _use_new_zipfile_serialization=not old)
    assert torch.equal(load_embeds(tmp_path / "e.pt", model())["text"], torch.ones(1, 5, 16))


class Evil:
    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('code ran')",)


BAD = torch.ones(5, 16)
BAD[3, 2] = torch.nan


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no embeddings at .*e.safetensors; give a file that --save-embeds wrote"),
        (b"", "these are no embeddings of a prompt: .*it is empty"),
        (b"a prompt, not embeddings", "these are no embeddings of a prompt: .*begins with"),
        (b'{"text": [1, 2]}', "is JSON text, not embeddings"),
        ({"prompt": torch.ones(5, 16)}, "holds 'prompt'; embeddings of a prompt are 'text'"),
        ({"text": torch.ones(5, 16), "x": torch.ones(1)}, "holds 'text', 'x'; embeddings"),
        ({"negative_text": torch.ones(5, 16)}, "holds 'negative_text'; embeddings"),
        ({"text": torch.ones(16)}, r"'text' has shape \[16\]; expected \[tokens, width\]"),
        ({"text": torch.ones(2, 5, 16)}, r"'text' has shape \[2, 5, 16\]"),
        ({"text": torch.ones(0, 16)}, r"'text' has shape \[0, 16\]"),
        ({"text": torch.ones(5, 16), "negative_text": torch.ones(1)}, r"'negative_text' has shape \[1\]"),
        ({"text": torch.ones(5, 16, dtype=torch.int64)}, "'text' is torch.int64; expected a tensor of float32"),
        ({"text": torch.ones(5, 24)}, "'text' is 24 wide, but template takes 16; .*another text encoder"),
        ({"text": torch.ones(9, 16)}, "'text' has 9 tokens; template takes at most 8"),
        ({"text": BAD}, "'text' holds NaN or infinity"),
        ({"text": torch.ones(5, 16), "negative_text": BAD * torch.inf}, "'negative_text' holds NaN"),
        (pickle.dumps(Evil()), "which only running code from the file could make; nothing was run"),
        (pickle.dumps([1, 2]), "e.safetensors"),
    ],
)
def test_other_files_are_refused_with_what_they_are(tmp_path, content, message):
    path = tmp_path / "e.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path)
    with pytest.raises(CheckpointError, match=message):
        load_embeds(path, model())


def test_guidance_needs_the_negative_prompts_embeddings_too(tmp_path):
    save_embeds(tmp_path / "e.safetensors", torch.ones(5, 16))
    assert load_embeds(tmp_path / "e.safetensors", model()).keys() == {"text"}
    for scale in (0.0, 5.0):
        with pytest.raises(CheckpointError, match="no 'negative_text', which guidance needs; .*--guidance-scale 1"):
            load_embeds(tmp_path / "e.safetensors", model(guidance_scale=scale))


def test_embeddings_in_place_of_prompts_give_the_same_rollout(tmp_path):
    config = model(guidance_scale=3.0)
    plain = config.setup()
    want = [chunk.frames for chunk in plain.rollout("a red ring", negative_prompt="blue", seed=1, num_chunk=2)]
    save_embeds(tmp_path / "e.safetensors", **plain.encode_prompts(["a red ring"], "blue").to_dict())
    slots = load_embeds(tmp_path / "e.safetensors", config)
    by_conditions = [chunk.frames for chunk in plain.rollout(conditions=slots, seed=1, num_chunk=2)]
    assert all(torch.equal(got[0], frames) for got, frames in zip(by_conditions, want, strict=True))
    without = derive_config(config, text_encoder=None).setup(text_encoder=GivenPrompts(slots, "a red ring"))
    got = [chunk.frames for chunk in without.rollout("a red ring", seed=1, num_chunk=2)]
    assert all(torch.equal(frames, other) for frames, other in zip(got, want, strict=True))
    assert "text_encoder" not in without.checkpoint_digests()
    with pytest.raises(ValueError, match="the prompt 'a blue ring' cannot be encoded: .* the embeddings of one prompt"):
        without.rollout("a blue ring")


def runner(tmp_path: Path, name: str, **changes: object) -> Runner:
    """A run of two chunks of the template, to ``<name>.mp4``."""
    config = derive_config(RUNNER_TEMPLATE, output=tmp_path / f"{name}.mp4", seed=1, num_chunk=2)
    return Runner(derive_config(config, **changes))


def umt5_runner(tmp_path: Path, name: str, **changes: object) -> Runner:
    """Likewise, with the small umT5 from a checkpoint, and a network of its width."""
    save_file(random_encoder().state_dict(), tmp_path / "umt5.safetensors")
    (tmp_path / "tokenizer.json").write_text("letters")
    config = replace(SMALL, checkpoint_path=str(tmp_path / "umt5.safetensors"))
    network = {"text_dim": SMALL.dim, "text_len": SMALL.text_len}
    changes |= {"pipeline": {"text_encoder": config, "diffusion_model": {"transformer": {"network": network}}}}
    return runner(tmp_path, name, **changes)


def same_video(tmp_path: Path, one: str, other: str) -> bool:
    return bool((read_video_frames(tmp_path / f"{one}.mp4") == read_video_frames(tmp_path / f"{other}.mp4")).all())


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_a_run_from_saved_embeddings_is_the_run_that_saved_them(tmp_path, monkeypatch, capsys, guidance_scale):
    file = tmp_path / "kept" / "e.safetensors"
    words = {"prompt": "a red ring", "negative_prompt": "blue", "guidance_scale": guidance_scale}
    runner(tmp_path, "a", save_embeds=file, **words).run()
    assert load_embeds(file).keys() == ({"text"} if guidance_scale == 1 else {"text", "negative_text"})
    monkeypatch.setattr(TemplateTextEncoder, "__init__", lambda *_: pytest.fail("a text encoder was made"))
    runner(tmp_path, "b", prompt_embeds=file, **words | {"prompt": ""}).run()
    assert same_video(tmp_path, "a", "b")
    assert "the prompt is recorded and not encoded" in capsys.readouterr().err
    saving, given = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert given["inputs"] == {"prompt_embeds": file_digest(file)} and saving["inputs"] == {}
    assert given["config"]["prompt_embeds"] == str(file) and saving["config"]["save_embeds"] is None
    assert "text_encoder" in saving["checkpoint"] and "text_encoder" not in given["checkpoint"]


def test_the_text_encoder_is_gone_before_the_transformer_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(text_encoder, "load_tokenizer", lambda *_: Letters())
    made: list[weakref.ref] = []
    alive: list[bool] = []
    setup = loading.setup_module

    def watched(config: object, device: str) -> object:
        if isinstance(config, WanTransformerConfig):
            alive.extend(ref() is not None for ref in made)
        module = setup(config, device)
        if isinstance(config, UMT5Config):
            made.append(weakref.ref(module))
        return module

    monkeypatch.setattr(loading, "setup_module", watched)
    umt5_runner(tmp_path, "a", guidance_scale=3.0, negative_prompt="blurry").run()
    assert alive == [False] and len(made) == 1
    umt5_runner(tmp_path, "b", guidance_scale=3.0, negative_prompt="blurry").run()
    assert len(made) == 1, "the second run has both prompts from disk"
    assert same_video(tmp_path, "a", "b")
    records = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"]
    assert records[0]["checkpoint"] == records[1]["checkpoint"]
    assert records[1]["checkpoint"]["text_encoder"] == file_digest(tmp_path / "umt5.safetensors")


def refused(run: Runner, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Runner, "_load", lambda *_: pytest.fail("weights were loaded before the refusal"))
    with pytest.raises(UserError) as error:
        run.run()
    return str(error.value)


@pytest.mark.parametrize(
    ("width", "changes", "message"),
    [
        (None, {}, "no embeddings at"),
        (24, {}, "'text' is 24 wide, but template takes 16"),
        (16, {"guidance_scale": 2.0}, "no 'negative_text', which guidance needs"),
        (16, {"prompt": "long " * 10_000}, "the prompt has 50000 characters"),
    ],
)
def test_embeddings_are_checked_before_any_work(tmp_path, monkeypatch, width, changes, message):
    if width is not None:
        save_embeds(tmp_path / "e.safetensors", torch.ones(5, width))
    assert message in refused(runner(tmp_path, "a", prompt_embeds=tmp_path / "e.safetensors", **changes), monkeypatch)
    assert not (tmp_path / "a.mp4").exists()


def test_a_missing_tokenizer_is_noticed_before_any_work(tmp_path, monkeypatch):
    run = umt5_runner(tmp_path, "a")
    (tmp_path / "tokenizer.json").unlink()
    message = refused(run, monkeypatch)
    assert "no tokenizer.json for the text encoder" in message and "--prompt-embeds" in message


def test_random_weights_need_no_tokenizer_with_embeddings_and_say_so_without(tmp_path, monkeypatch, capsys):
    save_embeds(tmp_path / "e.safetensors", torch.ones(5, SMALL.dim))
    given = umt5_runner(tmp_path, "a", ckpt_path="random:0", prompt_embeds=tmp_path / "e.safetensors")
    for name in ("umt5.safetensors", "tokenizer.json"):
        (tmp_path / name).unlink()
    given.run()
    assert json.loads((tmp_path / "a.json").read_text())["checkpoint"]["transformer.0"] == "random:0"
    assert capsys.readouterr().err.count("every part of the model takes its weights from random:0") == 1
    message = refused(umt5_runner(tmp_path, "b", ckpt_path="random:0"), monkeypatch)
    assert "random:0 has no tokenizer" in message and "--prompt-embeds" in message


def test_a_place_where_embeddings_cannot_be_saved_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--save-embeds .*file/e.safetensors cannot be written"):
        runner(tmp_path, "a", save_embeds=tmp_path / "file" / "e.safetensors").run()


def test_a_seed_in_place_of_every_checkpoint():
    transformer = model(checkpoint_path="a/b").diffusion_model.transformer
    full = derive_config(
        PIPELINE_TEMPLATE, text_encoder=replace(SMALL, checkpoint_path="e/f"), decoder={"checkpoint_path": "c/d"},
        diffusion_model={
            "transformer": {"checkpoint_path": "a/b"},
            "high_noise": (ExpertConfig(sigma_low=0.9, transformer=transformer),),
        },
    )  # fmt: skip
    got = with_checkpoints_from(full, "random:0")
    parts = [got.text_encoder, got.decoder, got.diffusion_model.transformer]
    parts.append(got.diffusion_model.high_noise[0].transformer)
    assert [part.checkpoint_path for part in parts] == ["random:0"] * 4
    assert got.encoder.checkpoint_path is None, "what names no checkpoint has none"
    assert derive_config(got, text_encoder=None).setup().checkpoint_digests()["transformer.0"] == "random:0"
