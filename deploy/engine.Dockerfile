# Verifier and drafter: one set of layers, two entry points. Build from the repository root:
#     docker build -f deploy/engine.Dockerfile --target verifier -t outrider-verifier:0.2.0 .
#     docker build -f deploy/engine.Dockerfile --target drafter -t outrider-drafter:0.2.0 .
# PYTHON_IMAGE: any image with Python 3.11 to 3.14 and its venv module, and apt where it is compiled.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The lock file: engine is for GPUs, with torch of PyPI; cpu has torch of TORCH_INDEX_URL, or of a mirror
# of that index, and no Triton, which saves gigabytes.
ARG EXTRA=engine
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
# Packages of the lock file, whose hashes pip checks, and nothing that would have to be built. A layer
# of their own: a change of the code does not install them anew.
COPY deploy/locks/$EXTRA.txt deploy/locks/build.txt ./
RUN python3 -m venv /opt/venv \
    && if [ "$EXTRA" = cpu ]; then export PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL"; fi \
    && /opt/venv/bin/pip install --require-hashes --only-binary :all: -r "$EXTRA.txt"
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r build.txt
# The host's side of a round is compiled here (docs/decisions/0048); --build-arg COMPILED= for Python
# as it is, without a compiler. BUILD_PACKAGES: what the base lacks for that, Python's headers, too.
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
# The shipped heads are at /opt/outrider/heads, wherever Python keeps its packages; what is in the
# image is in /opt/outrider/sbom.cdx.json, in CycloneDX.
RUN if [ -n "$COMPILED" ]; then export HATCH_BUILD_HOOKS_ENABLE=1; fi \
    && mkdir /opt/outrider \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /opt/wheel . \
    && /opt/venv/bin/pip install --no-deps --no-index /opt/wheel/*.whl \
    && ln -s /opt/venv/lib/python3*/site-packages/outrider/heads /opt/outrider/heads \
    && /opt/build/bin/cyclonedx-py environment /opt/venv --pyproject pyproject.toml \
        --output-reproducible -o /opt/outrider/sbom.cdx.json

FROM ${PYTHON_IMAGE} AS engine
# A GPU build: --build-arg APT_PACKAGES="gcc libc6-dev"; Triton compiles its launchers where it runs.
ARG APT_PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/outrider /opt/outrider
# A new volume takes over the owner.
RUN install -d -o 10001 -g 10001 /models
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    OUTRIDER_HOME=/models \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/tmp/triton
# For outrider_build_info.
ARG COMMIT=
ENV OUTRIDER_COMMIT=${COMMIT}
# A number, so that runAsNonRoot can be checked.
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
