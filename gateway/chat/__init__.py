"""How model families write conversations, answers and calls, at the level of text.

Knows nothing of HTTP or of tensors, and holds no tokenizer: token ids belong to the model side.
"""
