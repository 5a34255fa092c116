"""From plans to device inputs and back: slot buffers, rows, forward passes. Knows nothing of text or clients."""
