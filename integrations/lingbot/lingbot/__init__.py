"""LingBot-World as a plugin of flashdreams."""
