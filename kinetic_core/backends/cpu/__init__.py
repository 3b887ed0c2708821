"""The CPU backend: kernels compiled by numba, run from a tape by persistent worker threads."""
