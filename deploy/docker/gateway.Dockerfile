# The gateway alone: no torch, no transformers, none of the models' side. Built from the repository's root.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python -m venv /opt/gateway
# What is installed changes less often than our own code.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY wire wire
COPY gateway gateway
RUN /opt/gateway/bin/pip install --constraint constraints.txt '.[tracing]' \
    && /opt/gateway/bin/pip uninstall --yes pip

FROM python:${PYTHON}
RUN groupadd --gid 10001 gateway \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin gateway
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["tritongate"]
CMD ["serve"]
