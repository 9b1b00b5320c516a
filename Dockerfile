# The package with what it needs, without compilers and caches; docker-compose.yml runs every part of the system from it.
# docker build -t inference-tasks:0.1.0 .
FROM python:3.11.13-slim-bookworm AS build
ARG EXTRAS=flower,gateway,gpu,otel
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY inference_tasks inference_tasks
COPY routing routing
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.11.13-slim-bookworm
RUN useradd --create-home --uid 10001 app
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
# The module with the app lies here: mounted, or copied in an image made from this one.
WORKDIR /app
USER app
CMD ["inference-tasks", "--help"]
