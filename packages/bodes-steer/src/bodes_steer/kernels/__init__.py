"""Triton kernels. Imported only by the door that may use them."""
