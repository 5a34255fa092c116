"""Parts that models are built from. They know weights, caches and operations; no config files, no requests."""
