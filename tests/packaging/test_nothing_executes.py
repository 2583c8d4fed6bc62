"""Nothing in the shipped code turns bytes into code: no pickle, no eval, no shell (I13, G2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    path
    for package in ("proto", "server", "client", "connector")
    for path in (ROOT / package).rglob("*.py")
    if "egg-info" not in str(path)
)
MODULES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"),
    *("yaml", "code", "codeop", "imp", "runpy", "xmlrpc"),
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "execfile", "pickle_module"),
    *("torch.load", "torch.jit.load", "numpy.load", "np.load", "os.system", "os.popen", "tempfile.mktemp"),
}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Each place in a module that could run what a peer or a file says, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in MODULES or name in CALLS:
                yield f"line {getattr(node, 'lineno', 0)}: import of {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                yield f"line {node.lineno}: call of {called}"
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno}: {called} with {keyword.arg}={ast.unparse(keyword.value)}"


def test_there_is_something_to_look_at() -> None:
    rooms = {path.name for path in SHIPPED}
    assert {"daemon.py", "service.py", "session.py", "connector.py", "cache_pb2.py"} <= rooms


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bytes_become_code(path: Path) -> None:
    assert list(forbidden(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "from torch import load",
        "x = eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "torch.load(file)",
        "np.load(file)",
        "subprocess.run(text, shell=True)",
        "numpy.fromfile(file, allow_pickle=flag)",
        "os.system(text)",
        "__import__(name)",
        "from xmlrpc import client",
    ],
)
def test_the_gate_shuts(line: str) -> None:
    assert list(forbidden(ast.parse(line)))


def test_the_gate_lets_the_innocent_through() -> None:
    text = "import json\nimport torch\nre.compile(x)\nself.load(x)\nsubprocess.run([a], shell=False)\n"
    assert not list(forbidden(ast.parse(text)))
