"""Metrics, log lines and traces."""
