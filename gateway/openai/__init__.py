"""OpenAI's JSON: requests read and checked, answers and streams written.

Knows nothing of HTTP, of Triton or of tensors: it stands between bytes and `gateway.core.request`.
"""
