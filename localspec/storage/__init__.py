"""Files on disk: weight files, cached blocks, n-gram tables, and the threads that read them.

A leaf: it knows bytes and paths, nothing of models, requests or torch. Whatever it reads may be torn, stale or made to
harm, and is checked before use.
"""
