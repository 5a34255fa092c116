"""Measuring drafting through the Engine protocol: what is run, the records of it, and tables for people. Torch-free."""
