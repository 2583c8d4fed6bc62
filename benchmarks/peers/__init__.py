"""kvhost beside other caches, in one run: `make bench-peers`.

`environments` makes each one its own Python environment, `drivers` holds one program a cache that moves bytes
and looks keys up by that cache's own client, and `__main__` has them take turns and compares.
"""
