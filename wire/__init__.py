"""The tensor contract between the gateway and the models on Triton, and the events of the embedded Triton.

Both sides import this package and neither imports the other, so that a field has one definition, one
range and one spelling. It knows nothing of HTTP, of Triton's client or of the engine: only names, JSON
documents (as typed structs) and the byte layout of string tensors.

``README.md`` beside this file holds the same documents as tables; a test compares the two.
"""
