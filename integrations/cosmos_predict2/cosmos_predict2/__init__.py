"""Cosmos-Predict2.5 as a plugin of flashdreams."""
