"""A small language model trained on packed text with context-parallel attention."""
