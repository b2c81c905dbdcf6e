# NVIDIA's Triton with our engine in an environment of its own. Built from the repository's root.
# 26.07 is the first release without a fault of NVIDIA's bulletins up to 5875; its Python is 3.12, which is assumed below.
ARG TRITON=26.07-py3

FROM nvcr.io/nvidia/tritonserver:${TRITON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python3 -m venv /opt/tritongate/environment
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY wire wire
COPY triton_models triton_models
# https://download.pytorch.org/whl/cpu leaves out CUDA; empty: PyPI's build, with it.
ARG TORCH_INDEX=""
RUN /opt/tritongate/environment/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint constraints.txt '.[engine,tracing]' \
    && /opt/tritongate/environment/bin/pip uninstall --yes pip

FROM nvcr.io/nvidia/tritonserver:${TRITON}
# The engine's kernels are compiled where they run: torch's compiler builds its launchers with gcc.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /var/cache/tritongate \
    && chown 1000:1000 /var/cache/tritongate
COPY --from=build /opt/tritongate/environment /opt/tritongate/environment
COPY deploy/docker/start_triton.py deploy/docker/triton_health.py /opt/tritongate/
# Triton's stub takes the environment of the python3 that PATH finds first; the second says it again.
ENV PATH=/opt/tritongate/environment/bin:$PATH \
    PYTHONPATH=/opt/tritongate/environment/lib/python3.12/site-packages \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8001 8002
ENTRYPOINT ["python3", "/opt/tritongate/start_triton.py"]
