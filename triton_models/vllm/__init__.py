"""vLLM's engine in Triton's Python backend, with the tensors and files of Triton's official vLLM backend.

It knows vLLM and Triton's requests, and nothing of our own engine, prompts or chat formats. Only
`engine.py` imports vLLM.
"""
