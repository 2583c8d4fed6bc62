"""What of this folder runs where.

`devices` runs in a process of its own, with JAX on eight virtual devices: `test_devices.py` starts it.
`engine` needs tpu-inference, which `make test-tpu` brings: it names itself in the environment.
"""

import os

collect_ignore = [
    folder
    for folder, variable in (("devices", "KVHOST_TEST_DEVICES"), ("engine", "KVHOST_TEST_TPU_ENGINE"))
    if not os.environ.get(variable)
]
