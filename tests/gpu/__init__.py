"""Tests on a real GPU, see docs/cuda.md: `make test-gpu` runs them, or says that there is none."""
