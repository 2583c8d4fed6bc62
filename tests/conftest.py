"""For every test: this process forks, and gRPC must not stand in the way.

gRPC's own fork handlers can block os.fork() for ever while channels come and go (seen with grpcio 1.85),
and no timeout ends that. Tests fork, so this process uses gRPC without them. gRPC reads the switch once,
when it starts; then the environment is as before, so that engines and daemons that tests start keep gRPC's
default.
"""

import os

_SWITCH = "GRPC_ENABLE_FORK_SUPPORT"
_before = os.environ.get(_SWITCH)
os.environ[_SWITCH] = "0"

import grpc  # noqa: E402

grpc.insecure_channel("unix:/nowhere").close()

if _before is None:
    del os.environ[_SWITCH]
else:
    os.environ[_SWITCH] = _before
