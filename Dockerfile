# An image that trains on one node with or without NVIDIA GPUs: docs/docker.md says how to build and run it.
#
# Python packages are of the exact versions of constraints.txt and are installed before the source is copied, so that a
# change of the source rebuilds the last two small layers only.

# By digest (of the index for amd64 and arm64), as a tag can be moved. To move on: `docker buildx imagetools inspect
# nvidia/cuda:TAG` prints the digest of a tag; CUDA's version should be that of torch's wheel (torch.version.cuda).
# `base` holds the CUDA runtime and what the NVIDIA container runtime reads, such as the oldest driver allowed. The
# flavour `runtime` would add cuBLAS, NCCL and more a second time: torch's wheels bring their own.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143 AS base
# Ubuntu's archive keeps only the newest version of a package, so a pinned one could not be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

# The names of the dependencies alone: another change of pyproject.toml leaves the next stage as it is.
FROM build AS requirements
COPY pyproject.toml /
RUN python -c 'import tomllib; print(*tomllib.load(open("/pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    > /requirements.txt

FROM build AS dependencies
COPY constraints.txt /
COPY --from=requirements /requirements.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /constraints.txt --requirement /requirements.txt

FROM build AS wheel
WORKDIR /source
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY curricula curricula
COPY gigpo_lightning gigpo_lightning
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM base
# A number that no account of the host is likely to have; folders mounted from the host need `--user`, see docs/docker.md.
RUN groupadd --gid 10001 gigpo \
    && useradd --uid 10001 --gid gigpo --create-home --no-log-init gigpo \
    && install --directory --owner gigpo --group gigpo /cache /data /workspace /workspace/runs
COPY --from=dependencies /opt/venv /opt/venv
# Copied, not mounted: older versions of Buildah and Podman do not see that a mounted wheel has changed.
COPY --from=wheel /dist /opt/dist
RUN pip install --no-deps --no-index --no-cache-dir /opt/dist/*.whl
ENV HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    ALFWORLD_DATA=/data/alfworld \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /workspace
VOLUME ["/cache", "/data", "/workspace/runs"]
ENTRYPOINT ["python", "-m", "gigpo_lightning"]
CMD ["--help"]
