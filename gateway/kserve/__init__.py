"""The KServe door: clients written for ChatGLM on Triton work unchanged against the gateway."""
