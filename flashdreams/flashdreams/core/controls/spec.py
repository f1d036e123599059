"""Which controls a model takes, as data: checked before anything is generated, shown by pages and help texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flashdreams.core.controls.types import Control, ControlError, Keys, Mouse, key_name
from flashdreams.core.notices import say_once


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """What a model understands. The empty spec takes no controls."""

    words: tuple[str, ...] = ()
    """Words of its own, in lower case."""
    number: tuple[float, float] | None = None
    """Lowest and highest number, for a model that takes one."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Names of keys, and what each does, for people."""
    mouse: tuple[float, float] | None = None
    """Largest motion per frame, right or left and up or down, in widths and heights of the picture. Faster motion is
    slowed down to it, which is said once."""
    buttons: tuple[str, ...] = ()
    """Mouse buttons."""
    pose: bool = False
    """Camera poses."""
    intrinsics: bool = False
    """Whether poses must come with intrinsics."""
    picture: bool = False
    """Images that hold until the next."""
    frame: bool = False
    """Frames of a video beside the one that is made."""

    def __post_init__(self) -> None:
        for name in (*self.keys, *self.buttons):
            if key_name(name) != name:
                raise ControlError(f"key {name!r} of a control spec is written {key_name(name)!r} here")
        for word in self.words:
            if word != word.strip().lower() or not word:
                raise ControlError(f"word {word!r} of a control spec cannot be said; write it in lower case")

    def __bool__(self) -> bool:
        return self != ControlSpec()

    @property
    def pixels(self) -> bool:
        """Whether the model is controlled by images, which recordings do not hold."""
        return self.picture or self.frame

    def validate(self, control: Any) -> Control | None:
        """``control`` in the form that encoders get: as :meth:`check`, with motion slowed down to what is known."""
        given = self.check(control)
        return given if given is None or given.mouse is None else replace(given, mouse=self._slowed(given.mouse))

    def check(self, control: Any) -> Control | None:
        """``control`` as a :class:`Control`, with all of its motion, as it is before it is added up by frame.

        Args:
            control: a :class:`Control` or one of its parts alone, a word, a key's name or a number; ``None`` is none.

        Raises:
            ControlError: it is not one that this model takes. The message names it and what is understood.
        """
        given = self._of_text(control) if isinstance(control, str) else Control.of(control)
        if given is None:
            return None
        for kind in given.said:
            if not self._takes(kind):
                raise ControlError(f"control {control!r:.80} says {kind}; this model {self.describe()}")
        if given.word is not None and given.word not in self.words:
            raise self._unknown("control", given.word)
        for key in given.keys or ():
            if key not in self.keys:
                raise self._unknown("key", key)
        if given.number is not None and self.number is not None:
            low, high = self.number
            if not low <= given.number <= high:
                raise ControlError(f"control is {given.number:g}; expected a number from {low:g} to {high:g}")
        if given.pose is not None and self.intrinsics and given.pose.intrinsics is None:
            raise ControlError(
                "this pose has no intrinsics, which this model needs; give Pose(matrix, Intrinsics(...))"
            )
        for button in given.mouse.buttons if given.mouse else ():
            if button not in self.buttons:
                raise self._unknown("mouse button", button)
        return given

    def describe(self) -> str:
        """What is understood, as the end of a sentence: ``takes the keys w, a, s, d; mouse motion``."""
        kinds = [
            f"the words {', '.join(self.words)}" if self.words else "",
            "a number from {:g} to {:g}".format(*self.number) if self.number else "",
            f"the keys {', '.join(self.keys)}" if self.keys else "",
            "mouse motion" if self.mouse else "",
            f"the mouse buttons {', '.join(self.buttons)}" if self.buttons else "",
            f"camera poses{' with intrinsics' if self.intrinsics else ''}" if self.pose else "",
            "pictures" if self.picture else "",
            "video frames" if self.frame else "",
        ]
        named = [kind for kind in kinds if kind]
        return f"takes {'; '.join(named)}" if named else "takes no controls"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without what is not taken."""
        taken = {name: value for name, value in vars(self).items() if value not in (None, False, (), {})}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in taken.items()}

    def _takes(self, kind: str) -> bool:
        taken = {"word": self.words, "mouse": self.mouse or self.buttons}
        return taken.get(kind, getattr(self, kind, None)) not in (None, False, (), {})

    def _of_text(self, text: str) -> Control:
        """A word of the model, or the names of held keys with a plus between them."""
        word = text.strip().lower()
        if word in self.words:
            return Control(word=word)
        if self.number is not None:
            with suppress(ValueError):
                return Control(number=float(word))
        names = [part.strip() for part in word.split("+")]
        if word and all(name in self.keys for name in names):
            return Control(keys=Keys(*names))
        raise self._unknown("control", text)

    def _slowed(self, mouse: Mouse) -> Mouse:
        right, down = self.mouse or (0.0, 0.0)
        slowed = Mouse(max(-right, min(right, mouse.dx)), max(-down, min(down, mouse.dy)), mouse.buttons)
        if slowed != mouse:
            say_once(
                f"mouse motion beyond ({right:g}, {down:g}) per frame is slowed down to it: the model knows no more"
            )
        return slowed

    def _unknown(self, kind: str, name: str) -> ControlError:
        return ControlError(f"{kind} {name!r:.80} is not known; this model {self.describe()}")
