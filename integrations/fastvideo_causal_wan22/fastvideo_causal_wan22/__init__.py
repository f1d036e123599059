"""FastVideo CausalWan2.2 A14B as a plugin of flashdreams."""
