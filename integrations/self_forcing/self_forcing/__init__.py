"""Self-Forcing as a plugin of flashdreams."""
