"""The text encoder of Cosmos-Predict2.5: prompts to embeddings as diffusers' pipeline makes them with transformers'
Qwen2.5-VL, of which ours has the language model alone.

In :class:`float64.Float64`: the norms of transformers are float32 in any model, ours among them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from diffusers import Cosmos2_5_PredictBasePipeline
from torch import Tensor

from cosmos_predict2._keymaps import text_from_transformers
from cosmos_predict2._text_encoder import ReasonTextEncoder
from float64 import Float64, assert_same, randomize
from small_qwen import SMALL, write_tokenizer

pytestmark = pytest.mark.ci_cpu

LIMIT = 1e-10
PROMPTS = ["A robot waters <plants>.\n\nIt rains {hard}; 40°C", "", "long " * 60]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of Qwen2.5-VL, the parts that deal with text."""


@pytest.fixture(scope="module")
def theirs() -> transformers.Qwen2_5_VLForConditionalGeneration:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": SMALL.vocab_size, "hidden_size": SMALL.dim, "intermediate_size": SMALL.ffn_dim,
            "num_hidden_layers": SMALL.num_layers, "num_attention_heads": SMALL.num_heads,
            "num_key_value_heads": SMALL.num_kv_heads, "rms_norm_eps": SMALL.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 48},
    )  # fmt: skip
    with Float64():
        model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    randomize(model)
    return model


def embeddings_of_theirs(model: transformers.PreTrainedModel, tokenizer: Path) -> Tensor:
    read = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    pipeline = SimpleNamespace(tokenizer=read, text_encoder=model, _execution_device=torch.device("cpu"))
    encode = Cosmos2_5_PredictBasePipeline._get_prompt_embeds
    with Float64(), torch.no_grad():
        return encode(pipeline, PROMPTS, max_sequence_length=SMALL.text_len)


@pytest.mark.parametrize("layout", ["transformers 5", "transformers 4"])
def test_from_prompts_to_embeddings(theirs, layout: str, tmp_path: Path):
    """The chat around the prompt, padding that is read, a prompt cut off, every layer standardised, side by side."""
    write_tokenizer(tmp_path / "tokenizer.json")
    want = embeddings_of_theirs(theirs, tmp_path / "tokenizer.json")
    checkpoint = theirs.state_dict()
    if layout == "transformers 4":
        checkpoint = {key.replace("model.visual.", "visual."): value for key, value in checkpoint.items()}
        checkpoint = {key.replace("model.language_model.", "model."): value for key, value in checkpoint.items()}
    with Float64():
        ours = ReasonTextEncoder(replace(SMALL, tokenizer=str(tmp_path / "tokenizer.json"))).eval().double()
        ours.model.load_state_dict(text_from_transformers(checkpoint))
        with torch.no_grad():
            got = ours.encode(PROMPTS)
    assert got.shape == (3, SMALL.text_len, SMALL.num_layers * SMALL.dim)
    assert_same(f"Cosmos, prompts to embeddings, keys of {layout}", got, want, LIMIT)
    assert got[1, -1].std() > 0.5, "padding has embeddings of its own"
