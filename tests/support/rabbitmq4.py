"""RabbitMQ 4 beside the machine's own version: Debian 13's package in a directory tree of its own.

``python -m tests.support.rabbitmq4`` makes the tree once, in the directory that INFERENCE_RABBITMQ4_CHROOT names (as
root, by debootstrap, from the mirror in the machine's own package sources, some minutes and 700 MB). Then
``pytest --rabbitmq 4`` starts its nodes from there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import program
from tests.support.servers import Installation, MissingServerError, RabbitMQNode

VARIABLE = "INFERENCE_RABBITMQ4_CHROOT"
_RELEASE = "trixie"
_SERVER = "usr/lib/rabbitmq/bin/rabbitmq-server"

# $1 is the tree, $2 the node's directory, which is seen inside under the same path. The mounts live in a name space of
# their own, so they end with the process. The shell becomes the server: signals reach it under the same process id.
_ENTER = """
set -e
mount --bind /proc "$1/proc"
mount --bind /dev "$1/dev"
mkdir -p "$1$2"
mount --bind "$2" "$1$2"
tree=$1 directory=$2
shift 2
cd /
exec chroot --userspec=rabbitmq:rabbitmq --groups= "$tree" \\
  /bin/sh -c 'cd "$1" && shift && exec "$@"' - "$directory" "$@"
"""


class Tree(Installation):
    """A RabbitMQ in a directory tree, entered by chroot."""

    def __init__(self, root: Path) -> None:
        account = re.search(r"^rabbitmq:[^:]*:(\d+):", (root / "etc/passwd").read_text(), re.MULTILINE)
        assert account is not None, f"no user rabbitmq in {root}"
        # The number that the user has inside; the shell that enters needs to be root.
        super().__init__(owner=int(account[1]), user=None)
        self.root = root

    def command(self, name: str, directory: Path) -> list[str]:
        inside = f"/usr/lib/rabbitmq/bin/{name}"
        return ["unshare", "--mount", "sh", "-c", _ENTER, "enter", str(self.root), str(directory), inside]


def rabbitmq4_node() -> RabbitMQNode:
    """A node of RabbitMQ 4.

    Raises:
        MissingServerError: There is no tree, or this is not root, who alone may enter it.
    """
    root = Path(os.environ.get(VARIABLE, ""))
    if VARIABLE not in os.environ or os.geteuid() != 0 or not (root / _SERVER).exists():
        raise MissingServerError("RabbitMQ 4", f"set {VARIABLE} and run `python -m tests.support.rabbitmq4` as root")
    return RabbitMQNode(installation=Tree(root))


def build(root: Path) -> None:
    """Make the tree; what an earlier try has finished is kept."""
    if (root / _SERVER).exists():
        return
    debootstrap = program("debootstrap")
    if debootstrap is None:
        raise MissingServerError("debootstrap")
    if not (root / "usr/bin/apt-get").exists() or (root / "debootstrap").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        _run(debootstrap, "--variant=minbase", _RELEASE, str(root), _mirror())
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    proxies = Path("/etc/apt/apt.conf.d")
    for file in proxies.iterdir():
        if "Acquire" in file.read_text(errors="replace"):
            shutil.copy(file, root / "etc/apt/apt.conf.d" / file.name)
    script = (
        'mount --bind /proc "$1/proc"; mount --bind /dev "$1/dev"; exec chroot "$1" env DEBIAN_FRONTEND=noninteractive'
        " apt-get install --yes --no-install-recommends rabbitmq-server"
    )
    _run("unshare", "--mount", "sh", "-ec", script, "install", str(root))


def _mirror() -> str:
    """The first mirror of the machine's own package sources."""
    folder = Path("/etc/apt")
    for file in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        if file.suffix not in {".list", ".sources"} or not file.exists():
            continue
        found = re.search(r"^(?:URIs:|deb(?:\s+\[.*?\])?)\s+(\S+/debian/?)(?:\s|$)", file.read_text(), re.MULTILINE)
        if found:
            return found[1]
    raise MissingServerError("a mirror of Debian", "none is in /etc/apt")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Make the tree that the environment names."""
    if arguments or VARIABLE not in os.environ:
        sys.stderr.write(f"usage: {VARIABLE}=DIRECTORY python -m tests.support.rabbitmq4\n")
        return 2
    build(Path(os.environ[VARIABLE]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
