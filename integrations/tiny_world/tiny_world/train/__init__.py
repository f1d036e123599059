"""Training of the built-in model from nothing: ``python -m tiny_world.train``."""
