"""HTTP in, gRPC out: the OpenAI-compatible gateway.

Never imports torch, transformers or triton_models: the gateway holds no model and no tokenizer.
"""
