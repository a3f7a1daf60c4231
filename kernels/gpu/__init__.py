"""Triton kernels. Their definitions, in plain torch, are in the modules of the same names above."""
