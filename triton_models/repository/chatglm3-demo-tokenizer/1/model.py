from triton_models.serving.tokenizer import TritonPythonModel

__all__ = ["TritonPythonModel"]
