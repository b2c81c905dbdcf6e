"""Makes the checkpoint `chatglm3-demo`: dialogues, tokenizer, training, export and evaluation.

`python -m tools.demo` does everything. Nothing here is installed with the package.
"""
