"""The umT5 text encoder against transformers, and prompts to embeddings against diffusers' WanPipeline.

The maths is the same. transformers takes the mean square of its norms in float32 in any model: it runs in
:class:`float64.Float64`. Rows of padding mean nothing on either side and are not compared.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from diffusers import UniPCMultistepScheduler, WanPipeline

from flashdreams.recipes.wan.keymaps import umt5_from_transformers
from flashdreams.recipes.wan.text_encoder import UMT5TextEncoder
from flashdreams.recipes.wan.umt5 import UMT5Encoder, relative_buckets
from float64 import Float64, assert_same, assert_same_gradients, randomize
from small_umt5 import SMALL

pytestmark = pytest.mark.ci_cpu

LENGTH = 160
"""Beyond the distance from which positions are not told apart."""
WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "&", "dog", "runs", "."]


@pytest.fixture(scope="module")
def theirs() -> transformers.UMT5EncoderModel:
    config = transformers.UMT5Config(
        vocab_size=SMALL.vocab_size, d_model=SMALL.dim, d_kv=SMALL.dim_attn // SMALL.num_heads, d_ff=SMALL.dim_ffn,
        num_layers=SMALL.num_layers, num_heads=SMALL.num_heads, feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )  # fmt: skip
    with Float64():
        model = transformers.UMT5EncoderModel(config).eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def ours(theirs: transformers.UMT5EncoderModel) -> UMT5Encoder:
    encoder = UMT5Encoder(SMALL).double()
    encoder.load_state_dict(umt5_from_transformers(theirs.state_dict()))
    return encoder


def test_hidden_states_and_gradients(ours: UMT5Encoder, theirs: transformers.UMT5EncoderModel):
    ids = torch.randint(2, SMALL.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 90:] = 0
    real = mask.bool()
    with Float64():
        want = theirs(input_ids=ids, attention_mask=mask).last_hidden_state[real]
    got = ours(ids, mask)[real]
    assert_same("umT5 hidden states, one of two prompts padded", got, want)
    assert_same_gradients("umT5", got, want, ours, theirs, umt5_from_transformers)


def test_every_distance_up_to_512_has_the_bucket_of_transformers(theirs: transformers.UMT5EncoderModel):
    """Theirs in float32, as it is used."""
    attention = theirs.encoder.block[0].layer[0].SelfAttention
    position = torch.arange(512)
    want = attention._relative_position_bucket(position[None] - position[:, None])
    assert torch.equal(relative_buckets(512, SMALL.num_buckets, SMALL.max_distance), want)


def write_tokenizer(path: Path) -> None:
    """In the manner of T5's, a token per word."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    made.save(str(path))


def test_from_prompts_to_embeddings(ours: UMT5Encoder, theirs: transformers.UMT5EncoderModel, tmp_path: Path):
    """Cleaned, cut to tokens, cut off at the length, encoded, zero beyond the end mark."""
    write_tokenizer(tmp_path / "tokenizer.json")
    prompts = ["  a cat\n&amp;amp; a dog .", "", "a dog runs " * 10]
    text_encoder = UMT5TextEncoder(replace(SMALL, tokenizer=str(tmp_path / "tokenizer.json")))
    text_encoder.encoder = ours
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=theirs, vae=None, scheduler=UniPCMultistepScheduler(), transformer=None
    )
    with Float64(), torch.no_grad():
        want, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=SMALL.text_len)
    with torch.no_grad():
        got = text_encoder.encode(prompts)
    assert got.any(dim=2).sum(dim=1).tolist() == [7, 1, SMALL.text_len]
    assert_same("prompts to embeddings", got, want)
