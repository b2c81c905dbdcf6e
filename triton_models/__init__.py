"""The model side, which runs in Triton: checkpoints, text, the engine, and the repository entries.

Never imports the gateway.
"""
