"""Forward passes of our own, one module per family."""
