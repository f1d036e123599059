"""How a model is run, as opposed to what it computes. Torch-free; what it asks for is done in ``acceleration``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flashdreams.config import ConfigError, InstantiateConfig


@dataclass(frozen=True, kw_only=True)
class AccelerationConfig(InstantiateConfig):
    """What is done to a loaded pipeline. The defaults change no result by more than 1e-5 relative in float32."""

    entry: ClassVar[str] = "flashdreams.acceleration.apply:apply"
    """Named, not imported: acceleration builds on this package."""
    ahead: ClassVar[str] = "flashdreams.acceleration.ahead:begin"

    compile: Literal["auto", "off", "on"] = "auto"
    """Compile the blocks of the transformer. auto: on a CUDA GPU. On a CPU matrix products take most of the time and
    compiling takes longer than a short clip, so that it is off unless asked for."""
    compile_decoder: Literal["auto", "off", "on"] = "auto"
    """Compile the decoder too, likewise. Decoders that say so: Wan's VAE."""
    channels_last: bool = False
    """Convolutions of the decoder with channels innermost in memory, as kernels of GPUs want them. What it brings says
    `flashdreams bench vae --channels-last`; on a CPU nothing."""
    overlap_decode: Literal["auto", "off", "on"] = "auto"
    """Decode a chunk while it is committed and the next one is made: in a thread, and on a GPU on a stream of its own.
    auto: on a CUDA GPU. On a CPU both would share the same cores."""
    prewarm: bool = False
    """Compile for every shape of a run before its first frame, so that no later chunk has to wait."""
    reuse_compiled: bool = True
    """Keep what was compiled and take it up at the next start. In the folder `compiled` of the caches."""
    cuda_graph: bool = False
    """Run the transformer from CUDA graphs, so that the host has nothing to do between kernels. Worth it where kernels
    are short: small models and pictures."""
    cuda_graph_slots: int = 2
    """Rollouts that have graphs at the same time. Each slot keeps the memory of a rollout for the next one."""
    offload: Literal["none", "blocks"] = "none"
    """Keep the blocks of the transformer in the CPU's memory, two at a time on the GPU. The result is the same; speed
    is that of the bus."""
    quantize: Literal["none", "int8", "int8-dynamic", "fp8"] = "none"
    """An approximation: linear layers of the blocks in eight bits. int8: weights only, half the memory of bfloat16.
    int8-dynamic, fp8: inputs too, by torchao."""
    kv_dtype: Literal["model", "int8", "fp8"] = "model"
    """An approximation: keys and values of past frames in eight bits, half the memory of bfloat16."""
    profile: str | None = None
    """Print what each chunk takes, by phase. `lines`, or a file for a trace too (.json or .json.gz)."""

    @property
    def home(self) -> str | None:
        """Where the transformers' weights are read to; ``None``: to the device, as they need no change before."""
        return None if self.offload == "none" and self.quantize == "none" else "cpu"

    def validate(self) -> None:
        if self.profile not in (None, "lines") and not str(self.profile).endswith((".json", ".json.gz")):
            raise ConfigError(f"profile is {self.profile!r}; expected lines, or a file that ends in .json or .json.gz")
        if self.cuda_graph and self.offload != "none":
            raise ConfigError(
                f"cuda_graph and offload {self.offload} exclude each other: graphs need weights that stay in place"
            )
        if self.cuda_graph_slots < 1:
            raise ConfigError(f"cuda_graph_slots is {self.cuda_graph_slots}; expected 1 or more")
        if self.offload != "none" and self.quantize in ("int8-dynamic", "fp8"):
            raise ConfigError(f"offload {self.offload} and quantize {self.quantize} exclude each other; use int8")
