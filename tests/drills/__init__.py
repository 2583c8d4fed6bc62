"""Fault drills: each invariant under fire, against a real daemon and processes that use the real client.

One body of code a drill, in two sizes: the short form is part of every test run, the long form (the
environment variable KVHOST_DRILLS=long) is what docs/reliability.md reports.
"""
