from triton_models.serving.field import TritonPythonModel

__all__ = ["TritonPythonModel"]
