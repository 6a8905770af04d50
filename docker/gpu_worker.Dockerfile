# The worker. Build from the repository's root; on the CPU:
#   docker build -f docker/gpu_worker.Dockerfile -t carrel-gpu-worker:cpu \
#     --build-arg TORCH_INDEX=ADDRESS .
# with CUDA, where Triton compiles its launchers with a C compiler at run time:
#   docker build -f docker/gpu_worker.Dockerfile -t carrel-gpu-worker:cuda \
#     --build-arg PACKAGES="gcc libc6-dev" .
# The base by its digest, so that a build never changes by itself; --build-arg PYTHON=python:3.11-slim takes today's.
ARG PYTHON=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /venv
ARG TORCH=torch==2.13.0
# pip's own index has the build with CUDA, which runs on a CPU too but is gigabytes larger; PyTorch's index of CPU builds,
# given here, goes before it
ARG TORCH_INDEX=
RUN python -m pip --python /venv/bin/python install --root-user-action=ignore \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
WORKDIR /src
# what it depends on first, in a layer that outlives changes of the code
COPY pyproject.toml ./
RUN touch README.md LICENSE \
    && python -m pip --python /venv/bin/python install --root-user-action=ignore ".[gpu-worker,tracing]"
COPY README.md LICENSE ./
COPY carrel/__init__.py carrel/
COPY carrel/process carrel/process/
COPY gpu_worker gpu_worker/
COPY kv_store/__init__.py kv_store/
COPY kv_store/client kv_store/client/
COPY kv_store/v1 kv_store/v1/
RUN python -m pip --python /venv/bin/python install --root-user-action=ignore --no-deps --force-reinstall . \
    && rm /venv/bin/carrel
COPY docker/healthcheck.py /tmp/
RUN install -D -m 644 /tmp/healthcheck.py /opt/carrel/healthcheck.py

FROM ${PYTHON}
LABEL org.opencontainers.image.title="carrel-gpu-worker" org.opencontainers.image.licenses="Apache-2.0"
ARG PACKAGES=
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
# the sockets' owner, the same in all three images: who is another user is refused
RUN groupadd --gid 10001 carrel \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin carrel \
    && install -d -m 700 -o carrel -g carrel /run/carrel/store /run/carrel/worker /cache
COPY --from=build /venv /venv
COPY --from=build /opt/carrel /opt/carrel
# the root file system is read-only: what is written goes to a tmpfs or a volume
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
USER 10001:10001
ENTRYPOINT ["python", "-m", "gpu_worker"]
