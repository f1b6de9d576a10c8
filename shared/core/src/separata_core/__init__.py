"""Tensor operations, Triton kernels and access to the inside of transformers models."""
