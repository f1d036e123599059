"""LongLive as a plugin of flashdreams."""
