"""Measuring on a GPU host, also one without a network: see README.md beside this."""
