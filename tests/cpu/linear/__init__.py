"""Tests of the linear kernels and of what they are made of: SIMD vocabulary, packing, activations, embeddings."""
