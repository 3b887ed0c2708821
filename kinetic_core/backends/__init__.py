"""Kernel backends: each lowers a recorded program to one kind of device and runs it for any batch of rows."""
