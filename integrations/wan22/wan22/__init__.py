"""Wan2.2 as a plugin of flashdreams."""
