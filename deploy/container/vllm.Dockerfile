# A vLLM image with the connector in it. From the root of the repository, for the platform you run:
#
#   docker build -f deploy/container/vllm.Dockerfile --build-arg VLLM_IMAGE=YOUR-VLLM-IMAGE -t vllm-kvhost .
#
# Any image of vLLM 0.32 will do; kvhost adds itself, gRPC, click and rich to the Python that vLLM runs on.

ARG VLLM_IMAGE
FROM ${VLLM_IMAGE}
COPY . /tmp/kvhost
RUN python3 -m pip install --no-cache-dir /tmp/kvhost \
    || uv pip install --no-cache --python "$(command -v python3)" /tmp/kvhost
