from triton_models.serving.stream import TritonPythonModel

__all__ = ["TritonPythonModel"]
