"""Benchmarks for a GPU host, which may be without a network: see README.md in this folder."""
