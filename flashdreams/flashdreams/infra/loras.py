"""The LoRAs of a diffusion model. Which of them are in force belongs to a rollout, and changes between its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from flashdreams.core.checkpoint.lora import Lora, LoraSet, LoraSource, check_weights


class Loras:
    """LoRAs by name. Each rollout has weights of its own for them, so rollouts that interleave do not meet.

    The model's tensors hold one set of weights at a time: :meth:`use` exchanges it where the next rollout to make a
    chunk has another. Rollouts with different LoRAs on one model are therefore right in any order, but not in two
    threads at once, and each change takes the time of merging.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        self._sets = [
            LoraSet(getattr(expert, "checkpoint_root", expert), getattr(expert, "layouts", {}).values())
            for expert in experts
        ]
        self.default: dict[str, float] = {}
        """Weights that a new rollout starts with."""

    @property
    def digests(self) -> dict[str, str | None]:
        """Digest of each LoRA's file, by ``<name>.<expert>``."""
        return {f"{name}.{i}": lora.digest for i, each in enumerate(self._sets) for name, lora in each.loras.items()}

    def summary(self) -> dict[str, dict[str, str | float | None]]:
        """What is loaded, by ``<name>.<expert>``: source, default weight, layers matched, digest of the file."""
        return {
            f"{name}.{i}": {
                "source": lora.source, "weight": self.default[name], "layers": lora.layers, "digest": lora.digest,
            }
            for i, each in enumerate(self._sets) for name, lora in each.loras.items()
        }  # fmt: skip

    @property
    def names(self) -> list[str]:
        """Every LoRA that is loaded."""
        return list(dict.fromkeys(name for each in self._sets for name in each.loras))

    def load(self, name: str, source: LoraSource, *, weight: float = 1.0, expert: int | None = None) -> Lora:
        """Read a LoRA and match it with the model; rollouts that start from now on have it at ``weight``.

        Rollouts that run already keep what they have; ``Rollout.set_loras`` brings it in.

        Args:
            expert: which transformer it is for, where there are several (0: the one for the highest noise). LoRAs of
                several experts may share a name.

        Raises:
            CheckpointError: it is none, or does not fit.
            ValueError: the name is taken, the weight is not finite, or ``expert`` is missing.
        """
        if expert is None and len(self._sets) > 1:
            raise ValueError(f"this model has {len(self._sets)} experts; say with expert= which one {name!r} is for")
        if not 0 <= (expert or 0) < len(self._sets):
            raise ValueError(f"expert is {expert}; this model has {len(self._sets)}, from 0")
        check_weights({name: weight}, (name,))
        lora = self._sets[expert or 0].add(name, source, weight=0.0)
        self.default[name] = float(weight)
        return lora

    def unload(self, name: str) -> None:
        """Forget a LoRA. A rollout that still has it stops at its next chunk, saying so."""
        check_weights({name: 0.0}, self.names)
        for each in self._sets:
            if name in each.loras:
                each.remove(name)
        self.default.pop(name, None)

    def check(self, weights: Mapping[str, float]) -> dict[str, float]:
        """``weights``, if every name is loaded and every number finite.

        Raises:
            ValueError: otherwise.
        """
        check_weights(weights, self.names)
        return {name: float(weight) for name, weight in weights.items()}

    def use(self, weights: Mapping[str, float]) -> None:
        """Make the model's tensors those of a rollout with these weights; nothing happens where they are so already."""
        check_weights(weights, self.names)
        for each in self._sets:
            each.use({name: weight for name, weight in weights.items() if name in each.loras})
