"""Text and token ids: tokenizers, prompt formats, incremental detokenising, stop strings, grammars.

Knows nothing of Triton, of HTTP or of the engine, and never imports torch.
"""
