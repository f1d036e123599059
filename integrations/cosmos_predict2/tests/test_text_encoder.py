"""The text encoder as a part of a pipeline: tokens, files of weights, number formats, and a run that needs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cosmos_predict2._text_encoder import ReasonTextEncoder, standardise
from cosmos_predict2._tokenizer import SYSTEM, load_tokenizer
from cosmos_predict2.config import PIPELINE_COSMOS_PREDICT2_5_2B, ReasonConfig
from flashdreams.config import derive_config
from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.infra.loading import build_on_meta, candidates
from small_qwen import SMALL, write_tokenizer

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    write_tokenizer(tmp_path / "tokenizer/tokenizer.json")
    return str(tmp_path / "tokenizer/tokenizer.json")


def test_a_prompt_stands_in_a_chat_and_is_padded_or_cut_off(tokenizer: str) -> None:
    encoder = ReasonTextEncoder(replace(SMALL, tokenizer=tokenizer))
    read, ids = encoder.tokenizer, encoder.tokenize("two\nlines {here}")
    assert len(ids) == SMALL.text_len
    pad = read.token_to_id("<|endoftext|>")
    text = "".join(read.id_to_token(i) for i in ids if i != pad).replace("Ġ", " ").replace("Ċ", "\n")
    assert text == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\ntwo\nlines {{here}}<|im_end|>\n"
    assert ids[-1] == pad
    cut = encoder.tokenize("x" * 500)
    assert len(cut) == SMALL.text_len and cut[-1] == read.token_to_id("x")


def test_without_a_tokenizer_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompt-embeds"):
        ReasonTextEncoder(SMALL).encode(["a prompt"])
    with pytest.raises(CheckpointError, match="--prompt-embeds"):
        SMALL.identity()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), 10)


def test_the_tokenizer_of_another_model_is_refused(tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of at most 100"):
        load_tokenizer(tokenizer, 100)
    content = json.loads(Path(tokenizer).read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|im_end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="im_end"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), 1000)


def test_a_checkpoint_folder_of_diffusers_gives_weights_and_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    """``text_encoder`` beside ``tokenizer``, with the names of transformers, the vision tower and the head besides."""
    made = ReasonTextEncoder(replace(SMALL, tokenizer=tokenizer)).eval()
    names = {f"model.language_model.{key}": value for key, value in made.model.state_dict().items()}
    others = {"lm_head.weight": torch.zeros(3, 2), "model.visual.blocks.0.norm1.weight": torch.ones(4)}
    (tmp_path / "text_encoder").mkdir()
    save_file(names | others, tmp_path / "text_encoder/model.safetensors")
    config = replace(SMALL, checkpoint_path=str(tmp_path / "text_encoder"))
    loaded = config.setup()
    with torch.no_grad():
        assert torch.equal(loaded.encode(["a robot"]), made.encode(["a robot"]))
    assert loaded.load_report is not None
    digest, *versions = config.identity()
    assert len(digest) >= 32 and [word.split()[0] for word in versions] == ["tokenizers", "transformers"]


def test_in_bfloat16_the_rotary_frequencies_stay_exact(tokenizer: str) -> None:
    wide, narrow = (replace(SMALL, tokenizer=tokenizer, dtype=dtype).setup() for dtype in ("float32", "bfloat16"))
    assert narrow.model.norm.weight.dtype == torch.bfloat16
    kept = [(a, b) for a, b in zip(wide.model.rotary_emb.buffers(), narrow.model.rotary_emb.buffers(), strict=True)]
    assert kept and all(b.dtype == torch.float32 and torch.equal(a, b) for a, b in kept)
    embeddings = [encoder.encode(["a robot"]) for encoder in (wide, narrow)]
    assert embeddings[1].dtype == torch.bfloat16
    assert (embeddings[1].float() - embeddings[0]).square().mean() < 0.01


def test_vectors_are_standardised_by_their_unbiased_deviation() -> None:
    states = 5 + 3 * torch.randn(2, 3, 8, dtype=torch.float64)
    for vector, got in zip(states.view(-1, 8), standardise(states).view(-1, 8), strict=True):
        mean = sum(vector.tolist()) / 8
        deviation = (sum((x - mean) ** 2 for x in vector.tolist()) / 7) ** 0.5
        assert got.tolist() == pytest.approx([(x - mean) / (deviation + 1e-8) for x in vector.tolist()])


@pytest.mark.parametrize("layout", ["transformers 5", "transformers 4", "language model"])
def test_the_remap_of_the_text_encoder_is_full_bijection(layout: str) -> None:
    """At full size, against the keys and shapes of transformers' own class in the sizes of Qwen2.5-VL-7B."""
    import transformers

    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    }  # fmt: skip
    with torch.device("meta"):
        published = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config={"depth": 1})
        ).state_dict()
    if layout == "transformers 4":
        published = {key.replace("model.visual.", "visual."): value for key, value in published.items()}
        published = {key.replace("model.language_model.", "model."): value for key, value in published.items()}
    if layout == "language model":
        mark = "model.language_model."
        published = {key.removeprefix(mark): value for key, value in published.items() if key.startswith(mark)}
    config = derive_config(PIPELINE_COSMOS_PREDICT2_5_2B.text_encoder, checkpoint_path=None)
    assert isinstance(config, ReasonConfig)
    wanted = build_on_meta(config).model.state_dict()
    _, steps, match = choose_transform(wanted, published, candidates(config), dtype=torch.bfloat16)
    assert match.ok, match
    used = [source for step in steps for source in step.sources]
    left = [key for key in published if key not in used]
    assert len(used) == len(set(used)) == len(wanted)
    assert all("visual." in key or key == "lm_head.weight" for key in left)
    assert sum(value.numel() for value in wanted.values()) == 7_070_619_136


def test_a_run_encodes_its_prompts(shrunk, tokenizer: str, tmp_path: Path) -> None:
    """From a prompt to a video through every part of the small model."""
    text_encoder = {"tokenizer": tokenizer}
    runner = derive_config(shrunk(), pipeline={"text_encoder": text_encoder}, prompt="a robot", seed=0, device="cpu")
    written = [
        derive_config(runner, output=tmp_path / name, negative_prompt=negative).setup().run().read_bytes()
        for name, negative in (("a.mp4", None), ("b.mp4", None), ("c.mp4", "rain"))
    ]
    assert written[0] == written[1] != written[2]
