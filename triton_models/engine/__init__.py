"""The continuous-batching engine: token ids in, token ids out.

Knows nothing of text, of Triton or of HTTP.
"""
