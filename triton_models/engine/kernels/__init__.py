"""The forward pass's kernels for CUDA, in the Triton language. Importable only where its compiler is."""
