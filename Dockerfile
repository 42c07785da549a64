# Builds an image of mimo with cuBLAS, cuDNN and NCCL from this clone:
#
#   docker build -t mimo .                                    (--build-arg MIMO_CUDA_ARCH=90a: Hopper only, in a third of the time)
#   docker run --rm --gpus all -v /data:/data mimo doctor
#   enroot import -o mimo.sqsh dockerd://mimo                 (for IMAGE of examples/slurm/train.sbatch)
FROM node:22-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
    cmake ninja-build g++ python3 python3-pip \
    libopenblas-dev libjpeg-dev libwebp-dev libgif-dev libdeflate-dev \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /mimo
COPY . .
ARG MIMO_CUDA_ARCH
RUN npm run build:release

# The versions whose headers build.ts uses.
FROM debian:bookworm-slim AS libraries
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-pip
RUN python3 -m pip install --no-cache-dir --break-system-packages --no-deps --only-binary=:all: --target /opt/libraries \
    nvidia-cublas==13.1.0.3 nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9

FROM debian:bookworm-slim
COPY --from=libraries /opt/libraries/nvidia /opt/nvidia
COPY --from=build /mimo/dist/release/mimo /usr/local/bin/mimo
COPY --from=build /mimo/LICENSE /mimo/build/packaging/mimo-*-linux-x64/licences /usr/share/doc/mimo/
ENV MIMO_CUDA_LIBRARIES=/opt/nvidia/cu13/lib:/opt/nvidia/cudnn/lib:/opt/nvidia/nccl/lib \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["mimo"]
