"""ChatGLM's conversation formats, at the level of text: token ids belong to the model side.

Knows nothing of HTTP or of tensors, and holds no tokenizer.
"""
