"""ChatGLM's conversation formats, as far as text goes: token ids are the model's side.

Knows nothing of HTTP or of tensors, and holds no tokenizer.
"""
