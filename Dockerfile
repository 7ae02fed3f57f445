# A server that hosts models.
#   docker build -t trocar .
#   docker run --rm -p 127.0.0.1:50051:50051 -v trocar-data:/data trocar resnet50 --insecure
#
# `--insecure`: the container's network is the boundary, and `-p 127.0.0.1:...` keeps strangers out. Without it
# the server wants TLS and tokens, since it listens on every address of the container; docs/operating.md.
#
# The image above is for CUDA (`docker run --gpus all ...`) and runs without a GPU too. The same server without
# the CUDA libraries, about 4 GB smaller:
#   docker build -t trocar:cpu --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu .
#
# The root file system may be read-only (`--read-only --tmpfs /tmp`): only /data and /tmp are written to.

# Python 3.11.16 on Debian 12 for x86-64, ARM and others, as the publisher lists it: docker-library/repo-info,
# repos/python/remote/3.11-slim-bookworm.md at 33a22f41ac7b. A newer one:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

FROM ${BASE_IMAGE} AS build
# Where torch and torchvision come from. Empty: PyPI, whose Linux builds are for CUDA and run on a CPU too. The
# wheels of another index are not those of requirements.lock: their versions are checked, their hashes are only
# what that index says.
ARG TORCH_INDEX_URL=""
# What of Trocar is installed, see pyproject.toml: of server, otel, timm, transformers and peft, whose wheels are in the lock.
ARG EXTRAS=server
WORKDIR /source
RUN python -m venv /opt/trocar
ENV PATH=/opt/trocar/bin:$PATH
COPY constraints.txt requirements.lock ./
# Every wheel that gets into the image, and hatchling, which builds ours: pip refuses one with another hash.
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
      sed -i -E '/^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/d' requirements.lock \
      && pip download --no-cache-dir --no-deps --dest /wheels --constraint constraints.txt \
           --index-url "$TORCH_INDEX_URL" torch torchvision; \
    fi \
    && pip download --no-cache-dir --no-deps --dest /wheels --require-hashes --requirement requirements.lock
COPY . .
RUN pip install --no-cache-dir --no-index --find-links /wheels --constraint constraints.txt ".[${EXTRAS}]" \
    && pip check \
    && python -c 'import torchvision.ops, trocar_server.app.app'

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="Trocar" \
      org.opencontainers.image.description="Looks inside hosted PyTorch models while they run, over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/trocar /opt/trocar
# /data belongs to the user of the image; a volume that is mounted there for the first time takes that over.
RUN groupadd --gid 10001 trocar \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trocar \
    && install --directory --owner 10001 --group 10001 --mode 0700 /data
# Downloaded weights, tokens, trainers and data sets are in /data. What libraries think of as home is /tmp.
ENV PATH=/opt/trocar/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TROCAR_HOST=0.0.0.0 \
    TROCAR_PORT=50051 \
    TROCAR_HEALTH_PORT=50052 \
    TROCAR_METRICS_HOST=0.0.0.0 \
    TROCAR_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 50051 50052 9464
# The port for health checks alone answers without TLS and tokens, whatever the main port asks for.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["trocar", "status", "--ready", "--server", "localhost:50052", "--timeout", "5"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["trocar", "serve"]
