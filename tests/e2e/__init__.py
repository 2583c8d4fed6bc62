"""End to end: real vLLM engines and a real daemon, each a process of its own."""
