"""What runs on Triton's side: checkpoints, text, the engine, and the repository entries that serve them.

Never imports the gateway.
"""
