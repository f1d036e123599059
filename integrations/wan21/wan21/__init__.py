"""Wan2.1 as a plugin of flashdreams."""
