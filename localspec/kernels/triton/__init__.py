"""Kernels for NVIDIA cards, one operation a file. Only this package and its back ends import triton."""
