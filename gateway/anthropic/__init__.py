"""Anthropic's JSON: requests of `/v1/messages` read and checked, answers, events and errors written.

Knows nothing of Triton or of tensors: it stands between bytes and `gateway.core.request`.
"""
