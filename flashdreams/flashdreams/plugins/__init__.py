"""Finding the models that are installed (no torch)."""

API_VERSION = 1
"""Major version of what a plugin builds on. A plugin may state the one it was made for, as a module-level
``FLASHDREAMS_API = 1`` in its config module, so that a later runtime can say so instead of failing oddly."""
