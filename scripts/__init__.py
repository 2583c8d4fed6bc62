"""What `make` runs: set-up, generated code, the demo. Nothing here is part of the distribution."""
