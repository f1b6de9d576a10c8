"""Triton kernels. Imported only by the doors that may use them."""
