"""Pallas GPU kernels for packed attention and fused matmuls, each with a plain-JAX twin."""
