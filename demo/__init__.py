"""Makes the checkpoint `chatglm3-demo`: dialogues, tokenizer, training, export and evaluation.

`python -m demo` does everything. Nothing here is installed with the package.
"""
