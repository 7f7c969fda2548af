"""Numba CUDA kernels: one file an algorithm."""
