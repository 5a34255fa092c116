"""The line between the engine and every interface (terminal app, port, commands).

Standard library only. Knows what a request and an answer are; knows nothing of tensors, HTTP or terminals.
"""
