"""Workers whose KV cache lies in a device's memory (CUDA, ROCm, XPU): blocks move by vLLM's own block copies.

Importing this package imports neither vllm nor torch.
"""
