"""kvhostd: the daemon that owns the host memory, the index over it, and every hold on it.

Nothing is imported here: the populate helper loads this package with the standard library alone.
"""

__version__ = "0.1.0"
