# The package with the exact versions of constraints.txt, on a CPU: docker build -t scdiva . && docker run --rm scdiva
FROM python:3.11-slim
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /scdiva
COPY pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY src src
COPY scripts scripts
RUN make .venv/.core
ENV PATH=/scdiva/.venv/bin:$PATH
CMD ["make", "demo"]
