"""How `chatglm3-demo` is made: dialogues, tokenizer, training, export and evaluation.

`python -m demo` does all of it, in this order. Nothing here is installed with the package.
"""
