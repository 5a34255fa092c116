"""Operations of the engine: one reference in plain PyTorch that is their specification, and back ends for cards.

A leaf: knows tensors and cards, nothing of models, sequences or requests.
"""
