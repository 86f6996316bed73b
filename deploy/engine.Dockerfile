# Verifier and drafter: one set of layers, two entry points. Build from the repository root:
#     docker build -f deploy/engine.Dockerfile --target verifier -t outrider-verifier .
#     docker build -f deploy/engine.Dockerfile --target drafter -t outrider-drafter .
# PYTHON_IMAGE: any image with Python 3.11 or newer and its venv module, and apt where it is compiled.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A CPU build: --build-arg EXTRA=cpu (no Triton, a gigabyte less), and TORCH_INDEX_URL=<index of CPU
# wheels>. The default is what PyPI offers.
ARG EXTRA=engine
ARG TORCH_INDEX_URL=
WORKDIR /src
COPY constraints.txt pyproject.toml deploy/tools/requirements.py ./
# Dependencies have layers of their own: a change of the code does not install them anew.
RUN python3 -m venv /opt/venv \
    && torch="$(grep ^torch== constraints.txt)" \
    && /opt/venv/bin/pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
RUN python3 requirements.py pyproject.toml "$EXTRA,trace" > requirements.txt \
    && /opt/venv/bin/pip install -c constraints.txt -r requirements.txt
# The host's side of a round is compiled here (docs/decisions/0048); --build-arg COMPILED= for Python
# as it is, without a compiler. BUILD_PACKAGES: what the base lacks for that, Python's headers, too.
ARG COMPILED=1
ARG BUILD_PACKAGES="gcc libc6-dev"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$COMPILED" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $BUILD_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY README.md LICENSE ./
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
    && /opt/venv/bin/pip install --no-deps . \
    && python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install cyclonedx-bom==7.5.0 \
    && mkdir /opt/outrider \
    && ln -s /opt/venv/lib/python3*/site-packages/outrider/heads /opt/outrider/heads \
    && /opt/sbom/bin/cyclonedx-py environment /opt/venv --pyproject pyproject.toml \
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
