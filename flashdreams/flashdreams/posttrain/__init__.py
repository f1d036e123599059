"""Reinforcement training of a streaming model with the sampler that serves it: ``flashdreams train``."""
