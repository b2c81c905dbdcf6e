"""Benchmarks: `python -m bench engine|serving|delivery|usual|all`. Dated results go into LOG.md."""
