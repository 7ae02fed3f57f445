# A server that hosts models.
#   docker build -t trocar .
#   docker run --rm -p 127.0.0.1:50051:50051 -v trocar-data:/data trocar resnet50
#
# With a GPU: docker run --gpus all ... (the image above is the CUDA one).
# Without: a build without the CUDA libraries, about 4 GB smaller:
#   docker build -t trocar:cpu --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu .
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
# Where torch and torchvision come from. Empty: PyPI, whose Linux builds are for CUDA and run on a CPU
# too. They are installed as a pair from one index, before anything else: torchvision's operators are
# compiled against one build of torch and fail at import beside another.
ARG TORCH_INDEX_URL=""
WORKDIR /source
RUN python -m venv /opt/trocar
ENV PATH=/opt/trocar/bin:$PATH
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch torchvision
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[server]'

FROM python:${PYTHON_VERSION}-slim
LABEL org.opencontainers.image.title="Trocar" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/trocar /opt/trocar
RUN useradd --system --uid 10001 --create-home trocar \
    && install --directory --owner trocar /data
# The container's own network is the boundary: inside it the server listens on every address, and
# `docker run -p 127.0.0.1:...` decides who reaches it. Downloaded weights stay in /data.
ENV PATH=/opt/trocar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TROCAR_HOST=0.0.0.0 \
    TROCAR_INSECURE=true \
    TROCAR_PORT=50051 \
    TROCAR_DATA_DIR=/data
USER 10001
WORKDIR /home/trocar
VOLUME /data
EXPOSE 50051
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m \
    CMD ["trocar", "models", "--server", "localhost:50051"]
ENTRYPOINT ["trocar", "serve"]
