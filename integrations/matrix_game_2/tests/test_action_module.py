"""The action module and its rolling caches against a slow float64 reading of the publication."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.kv_cache import CacheGeometry
from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.network import ChunkContext
from matrix_game_2._action import ActionModule, Moment, initialize_cache
from matrix_game_2.config import MatrixGame2NetworkConfig

pytestmark = pytest.mark.ci_cpu

ROWS, COLUMNS, TOKENS, CHUNK, CHUNKS = 1, 2, 2, 3, 8
SMALL = MatrixGame2NetworkConfig(
    dim=12, num_heads=2, action_dim=32, action_heads=2, action_embed_dim=4, keyboard_dim=4, mouse_dim=2
)
KEYS_ALONE = derive_config(SMALL, keyboard_dim=7, mouse_dim=0)


class SlotCache:
    """The published cache of one sequence: frames are moved to the front when there is no room for a new chunk."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.global_end, self.local_end = capacity, 0, 0
        self.k: list[Tensor | None] = [None] * capacity
        self.v: list[Tensor | None] = [None] * capacity

    def put(self, k: list[Tensor], v: list[Tensor], start: int) -> tuple[Tensor, Tensor]:
        count, end = len(k), start + len(k)
        evicted = 0
        if end > self.global_end and count + self.local_end > self.capacity:
            evicted = count + self.local_end - self.capacity
            kept = self.local_end - evicted
            self.k[:kept], self.v[:kept] = self.k[evicted : evicted + kept], self.v[evicted : evicted + kept]
        self.local_end += end - self.global_end - evicted
        self.global_end = end
        self.k[self.local_end - count : self.local_end] = k
        self.v[self.local_end - count : self.local_end] = v
        return torch.stack(self.k[: self.local_end]), torch.stack(self.v[: self.local_end])


class Reference:
    """The module as equations, token by token and head by head, from the rows of the whole run."""

    def __init__(self, module: ActionModule, config: MatrixGame2NetworkConfig, window: int) -> None:
        self.w = {name: value.detach().double() for name, value in module.state_dict().items()}
        self.config, self.width = config, config.action_dim // config.action_heads
        self.keyboard = SlotCache(window)
        self.mouse = [SlotCache(window) for _ in range(TOKENS)]

    def __call__(self, x: Tensor, keys: Tensor, mouse: Tensor | None, start: int) -> Tensor:
        """``x`` ``[T, S, dim]``; ``keys`` and ``mouse`` ``[F, ...]`` of all frames up to the chunk's end."""
        frames = range(start, start + len(x))
        x = x.double().clone()
        if mouse is not None:
            for s in range(TOKENS):
                q, k, v = [], [], []
                for i, frame in enumerate(frames):
                    z = torch.cat((x[i, s], self.window(mouse, frame).flatten()))
                    z = F.gelu(self.linear("mouse_mlp.0", z), approximate="tanh")
                    z = self.linear("mouse_mlp.2", z)
                    z = F.layer_norm(z, z.shape, self.w["mouse_mlp.3.weight"], self.w["mouse_mlp.3.bias"], 1e-5)
                    for part, out in zip(self.linear("t_qkv", z).split(self.config.action_dim), (q, k, v)):
                        out.append(part.view(self.config.action_heads, self.width))
                q, k = ([self.turned(p, frame) for p, frame in zip(part, frames)] for part in (q, k))
                moved = self.attend(q, *self.mouse[s].put(k, v, start))
                for i, y in enumerate(moved):
                    x[i, s] += self.linear("proj_mouse", y)
        k, v = [], []
        for frame in frames:
            rows = [self.linear("keyboard_embed.0", row) for row in self.window(keys, frame)]
            rows = [self.linear("keyboard_embed.2", F.silu(row)) for row in rows]
            kv = self.linear("keyboard_attn_kv", torch.cat(rows))
            k.append(self.turned(kv[: self.config.action_dim].view(self.config.action_heads, -1), frame))
            v.append(kv[self.config.action_dim :].view(self.config.action_heads, -1))
        k, v = self.keyboard.put(k, v, start)
        out = x.clone()
        for i, frame in enumerate(frames):
            for s in range(TOKENS):
                q = self.linear("mouse_attn_q", x[i, s]).view(self.config.action_heads, -1)
                (y,) = self.attend([self.turned(q, frame)], k, v)
                out[i, s] += self.linear("proj_keyboard", y)
        return out

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def window(self, rows: Tensor, frame: int) -> Tensor:
        return torch.stack([rows[max(0, row)] for row in range(4 * frame - 12, 4 * frame)]).double()

    def turned(self, x: Tensor, frame: int) -> Tensor:
        """Each head normed, its stored weight unused; then the first four pairs of dimensions turned by the frame."""
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        for pair in range(4):
            for head in x:
                z = complex(head[2 * pair], head[2 * pair + 1]) * cmath.exp(1j * frame / 4**pair)
                head[2 * pair], head[2 * pair + 1] = z.real, z.imag
        return x

    def attend(self, q: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
        """Of ``[heads, D]`` over ``[n, heads, D]``, without a mask."""
        out = []
        for query in q:
            weights = torch.einsum("hd,nhd->hn", query, k).div(math.sqrt(self.width)).softmax(-1)
            out.append(torch.einsum("hn,nhd->hd", weights, v).flatten())
        return out


def made(config: MatrixGame2NetworkConfig) -> ActionModule:
    torch.manual_seed(0)
    module = ActionModule(config).double()
    for name, parameter in module.named_parameters():
        if "norm" in name or "proj" in name or "mlp.3" in name:
            torch.nn.init.normal_(parameter)
    return module.requires_grad_(False)


def context_of(start: int, window: int) -> ChunkContext:
    geometry = CacheGeometry(window, 0, TOKENS)
    return ChunkContext(
        rope_3d(range(start, start + CHUNK), ROWS, COLUMNS, 6), geometry.token_slots(start, start + CHUNK),
        geometry.visible(start + CHUNK) * TOKENS, start=start, shape=(CHUNK, ROWS, COLUMNS),
    )  # fmt: skip


def grouped(rows: Tensor, start: int) -> Tensor:
    """``[B, F, C] -> [B, T, 12, C]`` of the chunk."""
    return torch.stack([rows[:, [max(0, r) for r in range(4 * j - 12, 4 * j)]] for j in range(start, start + CHUNK)], 1)


@pytest.mark.parametrize("window", [6, 4, 9])
@pytest.mark.parametrize("config", [SMALL, KEYS_ALONE], ids=["mouse and keys", "keys"])
def test_eight_chunks_with_eviction_equal_the_published_cache(config: MatrixGame2NetworkConfig, window: int) -> None:
    """Two samples at once, two passes over each chunk (one that denoises, with other tokens, and the commit)."""
    module = made(config)
    references = [Reference(module, config, window) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    frames = 1 + 4 * (CHUNK * CHUNKS - 1)
    keys = torch.randn(2, frames, config.keyboard_dim, dtype=torch.float64, generator=generator)
    mouse = torch.randn(2, frames, 2, dtype=torch.float64, generator=generator) if config.mouse_dim else None
    cache = initialize_cache(config, CacheGeometry(window, 0, TOKENS), 2, torch.float64, torch.device("cpu"))
    for start in range(0, CHUNK * CHUNKS, CHUNK):
        moment = Moment.of(context_of(start, window), config, torch.float64)
        prepared = module.prepare(grouped(keys, start), None if mouse is None else grouped(mouse, start))
        for _ in range(2):
            x = torch.randn(2, CHUNK * TOKENS, config.dim, dtype=torch.float64, generator=generator)
            got = module(x, prepared, moment, cache)
            for sample, reference in enumerate(references):
                tokens = x[sample].view(CHUNK, TOKENS, -1)
                want = reference(tokens, keys[sample], None if mouse is None else mouse[sample], start)
                torch.testing.assert_close(got[sample].view_as(want), want, rtol=1e-9, atol=1e-9)


def test_a_pass_writes_the_slots_of_its_chunk_and_no_other() -> None:
    module, window = made(SMALL), 6
    cache = initialize_cache(SMALL, CacheGeometry(window, 0, TOKENS), 1, torch.float64, torch.device("cpu"))
    prepared = module.prepare(torch.randn(1, CHUNK, 12, 4).double(), torch.randn(1, CHUNK, 12, 2).double())
    x = torch.randn(1, CHUNK * TOKENS, 12, dtype=torch.float64)
    for start in range(0, 12, CHUNK):
        before = [(part.k.clone(), part.v.clone()) for part in (cache.keyboard, cache.mouse)]
        moment = Moment.of(context_of(start, window), SMALL, torch.float64)
        once = module(x, prepared, moment, cache)
        assert torch.equal(module(x, prepared, moment, cache), once), "a repeated pass gives the same answer"
        own = [frame % window for frame in range(start, start + CHUNK)]
        rest = [slot for slot in range(window) if slot not in own]
        for part, (k, v) in zip((cache.keyboard, cache.mouse), before):
            assert torch.equal(part.k[:, rest], k[:, rest]) and torch.equal(part.v[:, rest], v[:, rest])
            assert not torch.equal(part.k[:, own], k[:, own])


def test_without_a_cache_the_chunk_attends_to_itself() -> None:
    """As the first chunk does; training needs it."""
    module = made(SMALL)
    cache = initialize_cache(SMALL, CacheGeometry(6, 0, TOKENS), 1, torch.float64, torch.device("cpu"))
    prepared = module.prepare(torch.randn(1, CHUNK, 12, 4).double(), torch.randn(1, CHUNK, 12, 2).double())
    x = torch.randn(1, CHUNK * TOKENS, 12, dtype=torch.float64)
    rope = rope_3d(range(CHUNK), ROWS, COLUMNS, 6)
    alone = Moment.of(ChunkContext(rope, shape=(CHUNK, ROWS, COLUMNS)), SMALL, torch.float64)
    streamed = Moment.of(context_of(0, 6), SMALL, torch.float64)
    torch.testing.assert_close(module(x, prepared, alone, None), module(x, prepared, streamed, cache))


def test_the_stored_norm_weights_are_never_used() -> None:
    module = made(SMALL)
    cache = initialize_cache(SMALL, CacheGeometry(6, 0, TOKENS), 1, torch.float64, torch.device("cpu"))
    keys, mouse = torch.randn(1, CHUNK, 12, 4).double(), torch.randn(1, CHUNK, 12, 2).double()
    x = torch.randn(1, CHUNK * TOKENS, 12, dtype=torch.float64)
    moment = Moment.of(context_of(0, 6), SMALL, torch.float64)
    plain = module(x, module.prepare(keys, mouse), moment, cache)
    unused = [name for name, _ in module.named_parameters() if name.endswith("_norm.weight")]
    assert sorted(unused) == [
        "img_attn_k_norm.weight", "img_attn_q_norm.weight", "key_attn_k_norm.weight", "key_attn_q_norm.weight",
    ]  # fmt: skip
    for name in unused:
        module.get_parameter(name).mul_(5)
    assert torch.equal(module(x, module.prepare(keys, mouse), moment, cache), plain)


def test_a_new_module_changes_nothing() -> None:
    module = ActionModule(SMALL)
    cache = initialize_cache(SMALL, CacheGeometry(6, 0, TOKENS), 1, torch.float32, torch.device("cpu"))
    prepared = module.prepare(torch.randn(1, CHUNK, 12, 4), torch.randn(1, CHUNK, 12, 2))
    x = torch.randn(1, CHUNK * TOKENS, 12)
    assert torch.equal(module(x, prepared, Moment.of(context_of(0, 6), SMALL, torch.float32), cache), x)


def test_a_raw_sink_is_refused() -> None:
    geometry = CacheGeometry(9, 3, TOKENS, relative=True)
    with pytest.raises(ValueError, match="cache_relative with a sink of 3"):
        initialize_cache(SMALL, geometry, 1, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [{"action_blocks": 31}, {"action_heads": 3}, {"action_rope_dim": 3}, {"action_rope_dim": 18}, {"mouse_dim": 1},
     {"action_window": 0}],
)  # fmt: skip
def test_impossible_sizes_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes)) if "heads" not in str(changes) else "action_dim"):
        derive_config(SMALL, **changes).validate_tree()
