"""What pyproject.toml cannot say yet: the compiled copying of the connector."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # A plain shared library for ctypes, without Python in it: one file serves every version. Without a C
        # compiler kvhost is installed without it, and says so when it copies.
        Extension(
            "kvhost_connector._native",
            sources=["connector/kvhost_connector/native.c"],
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
