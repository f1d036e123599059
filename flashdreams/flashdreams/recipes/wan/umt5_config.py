"""Config of the umT5 text encoder (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from flashdreams.config import ConfigError
from flashdreams.infra.config import DType, TextEncoderConfig

if TYPE_CHECKING:
    from flashdreams.recipes.wan.text_encoder import UMT5TextEncoder  # noqa: F401 (named in quotes below)


@dataclass(frozen=True, kw_only=True)
class UMT5Config(TextEncoderConfig["UMT5TextEncoder"]):
    """Sizes of a umT5 encoder, and where its tokenizer is; the defaults are umT5-XXL, as in every Wan model."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.text_encoder:UMT5TextEncoder"
    dtype: DType = "bfloat16"
    transforms: tuple[str, ...] = field(
        default=("flashdreams.recipes.wan.keymaps:umt5_from_transformers",), metadata={"names_code": True}
    )
    residence: Literal["device", "cpu", "transient"] = "transient"
    cache_embeddings: bool = True
    tokenizer: str | None = None
    """``tokenizer.json``, or a folder or repository that holds one; by default it is looked for beside the checkpoint,
    where the published repositories have it."""
    text_len: int = 512
    """Tokens of a prompt, end mark included; more are cut off, fewer filled up with zero vectors."""
    vocab_size: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    """Relative positions that are told apart."""
    max_distance: int = 128
    """From this distance on they are not."""
    eps: float = 1e-6

    @property
    def tokenizer_place(self) -> str | None:
        """Where the tokenizer is looked for; ``None`` without weights that it could lie beside."""
        return self.tokenizer or self.checkpoint_path

    def identity(self) -> tuple[str, ...]:
        """The tokenizer's digest, and the versions of what prepares the text for it."""
        from flashdreams.recipes.wan.tokenizer import identity

        return identity(self.tokenizer_place)

    def validate(self) -> None:
        if self.dim_attn % self.num_heads:
            raise ConfigError(f"dim_attn={self.dim_attn} must be a multiple of num_heads={self.num_heads}")
        if self.num_buckets < 4 or self.num_buckets % 4 or self.max_distance <= self.num_buckets // 4:
            raise ConfigError(
                f"num_buckets={self.num_buckets}, max_distance={self.max_distance}; expected a multiple of 4, and more "
                "than a quarter of it"
            )
        if self.text_len < 1:
            raise ConfigError(f"text_len is {self.text_len}; expected at least 1")
        if self.dtype == "float16":
            raise ConfigError("dtype is 'float16', in which this encoder overflows; use 'bfloat16' or 'float32'")
