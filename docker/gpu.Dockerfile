# For NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t pl-grouprl:gpu .
# Then: docker run --rm --gpus all --shm-size 8g -v "$PWD:/home/trainer" pl-grouprl:gpu \
#     fit --config base/grpo.yaml --config mine.yaml
# torch brings its own CUDA libraries; the machine needs a driver and the NVIDIA container toolkit. nvcc is in no layer, so
# DeepSpeed's compiled optimizers (offload) need an image with it.
FROM python:3.11-slim

# A compiler for Triton, in the version of the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer
WORKDIR /opt/pl_grouprl
COPY constraints.txt pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY pl_grouprl pl_grouprl
RUN pip install --no-cache-dir --constraint constraints.txt '.[bitsandbytes,datasets,deepspeed,lora,math,tasks]'

WORKDIR /home/trainer
USER 1000
ENTRYPOINT ["pl-grouprl"]
CMD ["--help"]
