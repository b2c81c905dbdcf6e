from triton_models.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
