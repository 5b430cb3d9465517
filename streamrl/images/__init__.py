"""Images of prompts and of what tools answer: kept once by their hash, read defensively, and made tokens and pixels."""
