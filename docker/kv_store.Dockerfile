# The KV store, run by Ray: no CUDA, no torch. Build from the repository's root:
#   docker build -f docker/kv_store.Dockerfile -t carrel-kv-store .
# The base by its digest, so that a build never changes by itself; --build-arg PYTHON=python:3.11-slim takes today's.
ARG PYTHON=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /venv
WORKDIR /src
# what it depends on first, in a layer that outlives changes of the code
COPY pyproject.toml ./
RUN touch README.md LICENSE \
    && python -m pip --python /venv/bin/python install --root-user-action=ignore ".[kv-store,tracing]"
COPY README.md LICENSE ./
COPY carrel/__init__.py carrel/
COPY carrel/process carrel/process/
COPY kv_store kv_store/
RUN python -m pip --python /venv/bin/python install --root-user-action=ignore --no-deps --force-reinstall . \
    && rm /venv/bin/carrel
COPY docker/healthcheck.py /tmp/
RUN install -D -m 644 /tmp/healthcheck.py /opt/carrel/healthcheck.py

FROM ${PYTHON}
LABEL org.opencontainers.image.title="carrel-kv-store" org.opencontainers.image.licenses="Apache-2.0"
# the sockets' owner, the same in all three images: who is another user is refused
RUN groupadd --gid 10001 carrel \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin carrel \
    && install -d -m 700 -o carrel -g carrel /run/carrel/store /var/lib/carrel /var/lib/carrel/store
COPY --from=build /venv /venv
COPY --from=build /opt/carrel /opt/carrel
# the root file system is read-only: what is written goes to a tmpfs or a volume. Ray's folder is on the tmpfs: a crash
# leaves nothing there, and the worker does not see it
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp RAY_TMPDIR=/tmp
USER 10001:10001
ENTRYPOINT ["python", "-m", "kv_store"]
