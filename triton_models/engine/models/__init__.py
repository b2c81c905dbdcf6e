"""Our own forward passes, one module per model family."""
