"""Models that nobody built, each written down twice: what its parts are is known, what they are called is drawn.

A part is called by a word of the field, by a number (where it runs, or where it stands in a list), or it stands
elsewhere (a norm within its attention). Both spellings of one model are drawn apart from each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """``holds`` says what it is, row by row: names that both spellings share. ``turned``: stored transposed."""

    key: str
    shape: Shape
    holds: tuple[str, ...]
    turned: bool = False


# Words for each part; each spelling of a model draws a row for most, and any word of the row for some.
SPELLINGS = {
    "blocks": "blocks layers transformer_blocks h block stages encoder_layers units",
    "second": "single_blocks refiner_layers joint_blocks tail context_refiner extra_layers single_stream more",
    "self": "self_attn attn1 self_attention sa SelfAttention slf_attn self_attn.inner selfAttn",
    "cross": "cross_attn attn2 cross_attention xattn EncDecAttention ca cross_attn.inner crossAttn",
    "attn": "attn attention mha self_attn Attention att token_mixer core",
    "ffn": "ffn mlp ff feed_forward MLP DenseReluDense pos_ffn channel_mixer",
    "q": "q to_q q_proj query wq q_lin qry linear_q",
    "k": "k to_k k_proj key wk k_lin kee linear_k",
    "v": "v to_v v_proj value wv v_lin vlu linear_v",
    "o": "o to_out.0 out_proj output wo out proj dense",
    "qkv": "qkv to_qkv qkv_proj query_key_value Wqkv c_attn in_proj packed",
    "kv": "kv to_kv kv_proj key_value Wkv kv_lin ctx_in linear_kv",
    "norm_q": "norm_q q_norm query_norm ln_q qnorm q_layernorm rms_q norm_query",
    "norm_k": "norm_k k_norm key_norm ln_k knorm k_layernorm rms_k norm_key",
    "up": "fc1 w1 up_proj linear_1 net.0.proj lin_up 0 c_fc",
    "down": "fc2 w2 down_proj linear_2 net.2 lin_down 2 c_proj",
    "gate": "gate_proj gate gate.0 fc_gate linear_gate lin_gate w_gate gating",
    "norm_self": "attn_norm norm_attn pre_attn_norm input_layernorm self_attn_layer_norm ln_sa prenorm norm_msa",
    "norm_cross": "cross_norm norm_cross pre_cross_norm cross_layernorm encoder_attn_layer_norm ln_ca xnorm norm_mca",
    "norm_ffn": "ffn_norm norm_ffn pre_ffn_norm mlp_layernorm final_layer_norm ln_mlp ffnorm norm_mlp",
    "mod": "modulation scale_shift_table adaLN_modulation.1 mod.lin ada adaln_table shift_scale_gate norm.linear",
    "patch": "patch_embedding patch_embed.proj x_embedder img_in conv_in patchify stem x_in",
    "time": "time_embedding t_embedder.mlp time_in time_embedder timestep_embedder.mlp temb t_mlp sigma_embed",
    "text": "text_embedding text_embedder txt_in caption_projection y_embedder.y_proj context_in cond_proj tok_in",
    "image": "img_emb.proj image_embedder img_proj image_embed vision_in clip_proj ip_in pic_in",
    "time_out": "time_projection.1 time_proj t_block.1 adaln_single.linear modulation_in time_mod tproj mod_all",
    "head": "head.head proj_out final_layer.linear head final_linear to_pixels out_layer unembed",
    "head_norm": "head.norm norm_out final_layer.norm norm final_norm ln_f out_norm last_ln",
    "pos": "pos_embedding pos_embed position_embeddings pe pos_table position_embedding.weight wpe.weight absolute",
}
NUMBERED = ("norm{}", "ln_{}", "layer_norm{}", "norms.{}", "norm_{}")
# (gate, up, down), where the words for them go together
GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("fc1_g", "fc1_x", "fc2"),
    ("gate", "fc1", "fc2"),
    ("linear_gate", "linear_in", "linear_out"),
)
EMBED_NUMBERS = (("0", "2"), ("linear_1", "linear_2"), ("fc1", "fc2"), ("in_layer", "out_layer"), ("mlp.0", "mlp.2"))


@dataclass
class Plan:
    """Which parts a model has, and how large they are."""

    dim: int
    inner: int
    text_dim: int
    layers: int
    second: int
    cross: bool
    gated: bool
    bias: bool
    norm_bias: bool
    qk_norm: str
    mod: str
    image: bool
    pos: bool
    kinds: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = ("self", "cross", "ffn") if self.cross else ("self", "ffn")


def draw_plan(rng: random.Random) -> Plan:
    dim = rng.choice((64, 96, 128))
    return Plan(
        dim=dim,
        inner=rng.choice((4 * dim, 3 * dim, 2 * dim, dim)),
        text_dim=rng.choice((dim, 80, 256)),
        layers=rng.randint(2, 4),
        second=rng.choice((0, 0, 2, 3, 4)),
        cross=rng.random() < 0.6,
        gated=rng.random() < 0.3,
        bias=rng.random() < 0.6,
        norm_bias=rng.random() < 0.5,
        qk_norm=rng.choice(("", "full", "head")),
        mod=rng.choice(("", "table", "linear")),
        image=rng.random() < 0.3,
        pos=rng.random() < 0.5,
    )


class Speller:
    """Writes a plan down in one way."""

    def __init__(self, plan: Plan, rng: random.Random, *, ordinary: bool = False) -> None:
        self.plan, self.rng = plan, rng
        width = 6 if ordinary else 8  # the last words of a row are rare
        row = rng.randrange(width)
        loose = rng.choice((0.0, 0.0, 0.3, 1.0))
        self.words = {
            part: words.split()[rng.randrange(width) if rng.random() < loose else row]
            for part, words in SPELLINGS.items()
        }
        self.norms = rng.choice(("words", "words", "numbers", "inside"))
        self.number = rng.choice(NUMBERED)
        self.first = rng.choice((0, 1))
        self.layout = rng.choice(("by run", "by run", "norms first", "norms last"))
        self.shape = rng.choice(("names", "names", "names", "sublayers", "positions"))
        self.packed = rng.choice(("", "", "qkv", "kv"))
        self.gated = rng.choice(GATED)
        self.gate_first = rng.random() < 0.7
        self.embeds = rng.choice(EMBED_NUMBERS)
        self.tensors: list[Tensor] = []

    def spell(self) -> list[Tensor]:
        plan = self.plan
        self._add(self.words["patch"], "patch", (plan.dim, 16, 1, 2, 2), True)
        self._embedding("time", 256)
        self._add(self.words["time_out"], "time_out", (6 * plan.dim, plan.dim), True)
        self._embedding("text", plan.text_dim)
        if plan.image:
            self._embedding("image", plan.text_dim)
        if plan.pos:
            self.tensors.append(Tensor(self.words["pos"], (1, 257, plan.dim), ("pos",)))
        for index in range(plan.layers):
            self._block(f"{self.words['blocks']}.{index}", f"blocks.{index}", plan.kinds)
        for index in range(plan.second):
            self._block(f"{self.words['second']}.{index}", f"second.{index}", ("self", "ffn"))
        self._norm(self.words["head_norm"], "head_norm", plan.dim)
        self._add(self.words["head"], "head", (64, plan.dim), True)
        return self.tensors

    def _add(self, key: str, what: str, shape: Shape, bias: bool) -> None:
        self.tensors.append(Tensor(f"{key}.weight", shape, (f"{what}.w",)))
        if bias:
            self.tensors.append(Tensor(f"{key}.bias", shape[:1], (f"{what}.b",)))

    def _norm(self, key: str, what: str, dim: int) -> None:
        self._add(key, what, (dim,), self.plan.norm_bias)

    def _embedding(self, part: str, size: int) -> None:
        first, second = self.embeds
        self._add(f"{self.words[part]}.{first}", f"{part}.0", (self.plan.dim, size), True)
        self._add(f"{self.words[part]}.{second}", f"{part}.1", (self.plan.dim, self.plan.dim), True)

    def _block(self, key: str, what: str, kinds: tuple[str, ...]) -> None:
        """The parts of a block in the order of ``layout``, under their names, in sublayers, or by position."""
        parts: list[tuple[str, str]] = []
        for kind in kinds:
            parts += [("norm", kind), ("part", kind)] if self.layout == "by run" else [("part", kind)]
        norms = [("norm", kind) for kind in kinds]
        parts = {"by run": parts, "norms first": [*norms, *parts], "norms last": [*parts, *norms]}[self.layout]
        for place, (sort, kind) in enumerate(parts):
            number = kinds.index(kind)
            word = self.words["attn"] if kind == "self" and "cross" not in kinds else self.words[kind]
            if self.shape == "positions":
                home, norm = f"{key}.{place}", f"{key}.{place}"
            elif self.shape == "sublayers":
                home, norm = f"{key}.layer.{number}.{word}", f"{key}.layer.{number}.layer_norm"
            elif self.norms == "numbers":
                home, norm = f"{key}.{word}", f"{key}.{self.number.format(number + self.first)}"
            else:
                home = f"{key}.{word}"
                norm = f"{home}.norm" if self.norms == "inside" else f"{key}.{self.words['norm_' + kind]}"
            if sort == "norm":
                self._norm(norm, f"{what}.norm_{kind}", self.plan.dim)
            elif kind == "ffn":
                self._ffn(home, f"{what}.ffn")
            else:
                self._attention(home, f"{what}.{kind}", self.plan.text_dim if kind == "cross" else self.plan.dim)
        if self.plan.mod == "table":
            self.tensors.append(Tensor(f"{key}.{self.words['mod']}", (1, 6, self.plan.dim), (f"{what}.mod",)))
        elif self.plan.mod == "linear":
            self._add(f"{key}.{self.words['mod']}", f"{what}.mod", (6 * self.plan.dim, self.plan.dim), True)

    def _attention(self, key: str, what: str, source: int) -> None:
        dim, bias = self.plan.dim, self.plan.bias
        packed = self.packed if source == dim or self.packed == "kv" else ""
        for part in "qkvo":
            if part in packed:
                if part == packed[0]:
                    rows = len(packed) * dim
                    home = f"{key}.{self.words[packed]}"
                    held = tuple(f"{what}.{one}" for one in packed)
                    self.tensors.append(Tensor(f"{home}.weight", (rows, source), tuple(f"{one}.w" for one in held)))
                    if bias:
                        self.tensors.append(Tensor(f"{home}.bias", (rows,), tuple(f"{one}.b" for one in held)))
                continue
            self._add(f"{key}.{self.words[part]}", f"{what}.{part}", (dim, source if part in "kv" else dim), bias)
        if self.plan.qk_norm:
            for part in "qk":
                size = dim if self.plan.qk_norm == "full" else 16
                self.tensors.append(Tensor(f"{key}.{self.words['norm_' + part]}.weight", (size,), (f"{what}.n{part}",)))

    def _ffn(self, key: str, what: str) -> None:
        dim, inner, bias = self.plan.dim, self.plan.inner, self.plan.bias
        words = dict(zip(("gate", "up", "down"), self.gated, strict=True)) if self.plan.gated else self.words
        order = [("up", inner, dim), ("down", dim, inner)]
        if self.plan.gated:
            order.insert(0 if self.gate_first else 1, ("gate", inner, dim))
        for part, rows, columns in order:
            self._add(f"{key}.{words[part]}", f"{what}.{part}", (rows, columns), bias)
