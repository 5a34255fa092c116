"""Training of drafters: differentiable forms of the draft networks, answers of the target, the loop, and the files.

Knows drafters and weights; knows nothing of engines, requests or interfaces.
"""
