"""The client side of kvhost: what an engine's process uses to talk to kvhostd, and `kvhostctl` for people.

`session` and `link` are the scheduler's side (hashes over gRPC), `worker` and `mapping` the worker's side
(bytes through shared memory), `admin` and `ctl` are for people. Nothing here imports an engine or an
accelerator library, and importing a module opens no socket and starts no thread.
"""
