"""Both parts of a Wan model in one file, in native keys under ``dit.`` and ``vae.``."""

from __future__ import annotations

from flashdreams.core.checkpoint.keymap import Drop, KeyMap

dit = KeyMap((Drop("vae.*", why="the decoder's part of the file"), (r"^dit\.", ""))).apply
vae = KeyMap((Drop("dit.*", why="the transformer's part of the file"), (r"^vae\.", ""))).apply
