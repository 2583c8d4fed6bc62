"""Reads a Dockerfile and carries its steps out in a plain root, where no container engine exists.

What is the same as with an engine: the base is a minimal Debian, steps run in order in a root of their own,
`COPY` takes what `.dockerignore` leaves, and the result is run with the image's user, environment and entry
point. What is not: namespaces and limits of a container, layers, and the registry's own base image.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tools import tool

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LENT_CERTIFICATES = "/etc/ssl/lent-to-pip.pem"


@dataclass(frozen=True)
class Step:
    """One instruction: its word in capitals, and the rest with continued lines joined."""

    word: str
    rest: str


@dataclass
class Image:
    """What a stage came to."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    healthcheck_options: dict[str, str] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"

    def command(self, arguments: Sequence[str], *, user: str | None = None) -> list[str]:
        """A command line that runs these arguments inside, as the image's user or another."""
        uid, _, gid = (user or self.user).partition(":")
        # Nothing of our own environment but what the network needs here.
        kept = [f"{name}={value}" for name, value in {**_network(), **self.environment}.items()]
        # As in a container: /proc, /sys and /dev are there. The mounts go with their namespace.
        mounts = " && ".join(f"mount --rbind /{name} {self.root}/{name}" for name in ("proc", "sys", "dev"))
        return [
            *(
                tool("unshare"),
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                f'{mounts} && exec "$@"',
                "sh",
            ),
            *(tool("chroot"), f"--userspec={uid}:{gid}", "--groups=", str(self.root)),
            *("/usr/bin/env", "-i", *kept, *arguments),
        ]


def steps(dockerfile: Path) -> list[Step]:
    """The instructions of a Dockerfile, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    words = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [Step(word.upper(), rest.strip()) for word, rest in words]


def build(dockerfile: Path, context: Path, base: Path, folder: Path) -> Image:
    """Carries out every stage; returns the last.

    Args:
        context: what `COPY` takes from.
        base: a root of the Debian release that the stages are FROM; it is copied.
        folder: where the roots of the stages are made.

    Raises:
        AssertionError: an instruction failed, or is one that this cannot carry out.
    """
    stages: dict[str, Image] = {}
    image: Image | None = None
    for step in steps(dockerfile):
        if step.word == "FROM":
            name, _, alias = step.rest.partition(" AS ")
            assert name == "debian:bookworm-slim", f"FROM {name}: only Debian bookworm can be made here"
            image = Image(folder / (alias or "final"))
            stages[alias or "final"] = image
            subprocess.run(["cp", "-a", str(base), str(image.root)], check=True)
            continue
        assert image is not None, f"{step.word} before FROM"
        _carry_out(step, image, stages, context)
    assert image is not None, f"{dockerfile} has no FROM"
    return image


def _carry_out(step: Step, image: Image, stages: Mapping[str, Image], context: Path) -> None:
    if step.word == "RUN":
        result = subprocess.run(
            image.command(["/bin/sh", "-c", step.rest]), capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"RUN {step.rest}\n{result.stdout}{result.stderr}"
    elif step.word == "COPY":
        *options, source, target = step.rest.split()
        into = image.root / target.lstrip("/")
        if options:
            [stage] = [option.removeprefix("--from=") for option in options]
            subprocess.run(["cp", "-a", str(stages[stage].root / source.lstrip("/")), str(into)], check=True)
        else:
            assert source == "."
            for path in sent(context):
                (into / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(context / path, into / path)
    elif step.word == "ENV":
        image.environment.update(pair.split("=", 1) for pair in step.rest.split())
    elif step.word == "USER":
        image.user = step.rest
    elif step.word == "ENTRYPOINT":
        image.entrypoint = json.loads(step.rest)
    elif step.word == "HEALTHCHECK":
        options, _, command = step.rest.partition(" CMD ")
        image.healthcheck = json.loads(command)
        image.healthcheck_options = dict(item.lstrip("-").split("=") for item in options.split())
    elif step.word == "STOPSIGNAL":
        image.stop_signal = step.rest
    else:
        raise AssertionError(f"{step.word} is not an instruction that can be carried out here")


def sent(context: Path) -> Iterator[Path]:
    """The files that an engine would be sent, as `.dockerignore` says; paths below the context."""
    lines = (context / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    dropped = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    for name in kept:
        top = context / name
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            path = file.relative_to(context)
            if file.is_file() and not any(fnmatch.fnmatch(part, d) for part in path.parts for d in dropped):
                yield path


def make_base(folder: Path) -> None:
    """A minimal Debian bookworm, of the packages that its slim images have."""
    command = [tool("debootstrap"), "--variant=minbase", "bookworm", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def lend_network(root: Path) -> None:
    """What an engine gives every container: name resolution. And the certificate authorities that pip is told
    to trust on this host."""
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    if "PIP_CERT" in os.environ:
        lent = root / LENT_CERTIFICATES.lstrip("/")
        lent.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.environ["PIP_CERT"], lent)


def _network() -> dict[str, str]:
    names = ("PIP_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT", "http_proxy", "https_proxy", "no_proxy")
    lent = {name: os.environ[name] for name in names if name in os.environ}
    if "PIP_CERT" in lent:
        lent["PIP_CERT"] = LENT_CERTIFICATES
    return {"DEBIAN_FRONTEND": "noninteractive", **lent}
