# fleetpipe in an image, on CPUs; the build's context is the clone:
#     docker build --tag fleetpipe .
#     docker run --rm --volume "$PWD:/work" fleetpipe run --nproc 2 train.py
# On GPUs, with an image that has a Python of 3.10 to 3.12 or installs one, and NVIDIA's libraries:
#     docker build --tag fleetpipe:gpu --build-arg EXTRA=gpu \
#         --build-arg BASE=nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04 .
ARG BASE=python:3.11-slim
FROM ${BASE}
# cpu: paddlepaddle 3.3; gpu: paddlepaddle-gpu 2.6.2, for CUDA 11.8.
ARG EXTRA=cpu
# libgomp1: Paddle's library is linked to it, and slim images lack it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && if ! command -v python3 > /dev/null; then \
        apt-get install --yes --no-install-recommends python3 python3-pip python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/fleetpipe
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir --no-compile \
        "/opt/fleetpipe[${EXTRA},examples,project,watch]"
ENV PATH=/opt/venv/bin:$PATH OMP_NUM_THREADS=1
WORKDIR /work
ENTRYPOINT ["fleetpipe"]
CMD ["doctor"]
