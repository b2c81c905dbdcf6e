"""Benchmarks: `python -m bench engine|serving|all`. Results go, with their date, to LOG.md."""
