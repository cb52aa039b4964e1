# For CPUs: docker build -f docker/cpu.Dockerfile -t pl-grouprl:cpu .
# Then: docker run --rm -v "$PWD/runs:/home/trainer/runs" pl-grouprl:cpu fit --config grpo_pg.yaml
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 trainer
WORKDIR /opt/pl_grouprl
COPY constraints.txt ./
# The index of PyTorch has builds without CUDA, which take a tenth of the space.
RUN pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY pl_grouprl pl_grouprl
RUN pip install --no-cache-dir --constraint constraints.txt '.[lora,math,tasks]'

WORKDIR /home/trainer
USER 1000
ENTRYPOINT ["pl-grouprl"]
CMD ["--help"]
