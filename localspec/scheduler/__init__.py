"""Which sequences run next and how far. Torch-free; knows upper bounds of lengths, never device values."""
