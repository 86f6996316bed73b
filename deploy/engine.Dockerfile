# Verifier and drafter: the same layers with two entry points. Build in the root of the repository:
#     docker build -f deploy/engine.Dockerfile --target verifier -t outrider-verifier:0.2.0 .
#     docker build -f deploy/engine.Dockerfile --target drafter -t outrider-drafter:0.2.0 .
# PYTHON_IMAGE: any image with Python 3.11 to 3.14 and its venv module, and with apt unless COMPILED is empty.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Name of the lock file. engine is for GPUs: it has PyPI's torch with CUDA, and Triton. cpu has the CPU build
# of torch from TORCH_INDEX_URL, and no Triton, which saves several gigabytes.
ARG EXTRA=engine
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
# pip installs the packages of the lock files, checks their hashes, and builds none of them. This layer
# does not depend on the code, so a change of the code does not install them again.
COPY deploy/locks/$EXTRA.txt deploy/locks/build.txt ./
RUN python3 -m venv /opt/venv \
    && if [ "$EXTRA" = cpu ]; then export PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL"; fi \
    && /opt/venv/bin/pip install --require-hashes --only-binary :all: -r "$EXTRA.txt"
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r build.txt
# mypyc compiles the Python code that runs on the CPU in every round (docs/decisions/0048). With
# --build-arg COMPILED= nothing is compiled. BUILD_PACKAGES are the Debian packages that the compilation
# needs and the base image lacks: a C compiler and, for Debian's own Python, its headers.
ARG COMPILED=1
ARG BUILD_PACKAGES="gcc libc6-dev"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$COMPILED" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $BUILD_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY outrider outrider
COPY drafter/outrider_drafter drafter/outrider_drafter
COPY verifier/outrider_verifier verifier/outrider_verifier
COPY router/outrider_router router/outrider_router
COPY benchmarks benchmarks
COPY deploy/ray/outrider_ray deploy/ray/outrider_ray
COPY heads heads
COPY tools/compiled_wheel.py tools/compiled_wheel.py
# /opt/outrider/heads are the bundled heads, whatever Python's version is. /opt/outrider/sbom.cdx.json is
# the software bill of materials (CycloneDX).
RUN if [ -n "$COMPILED" ]; then export HATCH_BUILD_HOOKS_ENABLE=1; fi \
    && mkdir /opt/outrider \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /opt/wheel . \
    && /opt/venv/bin/pip install --no-deps --no-index /opt/wheel/*.whl \
    && ln -s /opt/venv/lib/python3*/site-packages/outrider/heads /opt/outrider/heads \
    && /opt/build/bin/cyclonedx-py environment /opt/venv --pyproject pyproject.toml \
        --output-reproducible -o /opt/outrider/sbom.cdx.json

FROM ${PYTHON_IMAGE} AS engine
# For GPUs, set --build-arg APT_PACKAGES="gcc libc6-dev": Triton compiles its launchers at run time.
ARG APT_PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/outrider /opt/outrider
# A new volume gets the owner of this directory.
RUN install -d -o 10001 -g 10001 /models
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    OUTRIDER_HOME=/models \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/tmp/triton
# The commit that outrider_build_info shows.
ARG COMMIT=
ENV OUTRIDER_COMMIT=${COMMIT}
# The user is a number, because Kubernetes can check runAsNonRoot only then.
USER 10001:10001

FROM engine AS verifier
LABEL org.opencontainers.image.title="outrider-verifier" \
      org.opencontainers.image.description="Outrider's verifier: the target model" \
      org.opencontainers.image.licenses="Apache-2.0"
# gRPC, metrics
EXPOSE 50051 9101
ENTRYPOINT ["outrider-verifier"]

FROM engine AS drafter
LABEL org.opencontainers.image.title="outrider-drafter" \
      org.opencontainers.image.description="Outrider's drafter: draft heads and models" \
      org.opencontainers.image.licenses="Apache-2.0"
# gRPC, metrics
EXPOSE 50052 9102
ENTRYPOINT ["outrider-drafter"]
