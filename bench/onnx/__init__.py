"""A recipe: a decoder exported to ONNX, served by ONNX Runtime, and measured against our engine on a CPU."""
