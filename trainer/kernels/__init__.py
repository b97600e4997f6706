"""Triton kernels, each beside the plain torch it replaces. Imported only where a GPU runs them."""
