"""Causal-Forcing as a plugin of flashdreams."""
