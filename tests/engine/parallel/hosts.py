"""Two hosts on one machine: network namespaces with a cable between them, where the kernel allows it."""

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode == 0


@contextmanager
def two_hosts():
    """Commands that begin a process on the one and on the other; None: not allowed here."""
    names = [f"playground-{os.getpid()}-{number}" for number in range(2)]
    try:
        if not all(ip("netns", "add", name, check=False) for name in names):
            yield None
            return
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for number, name in enumerate(names):
            inside = ("-n", name)
            ip(*inside, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"cable{number}")
            ip(*inside, "link", "set", f"cable{number}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names]
    except (OSError, subprocess.CalledProcessError):
        yield None
    finally:
        for name in names:
            with suppress(OSError):
                ip("netns", "del", name, check=False)


def start(before, program, rank, ranks, port, **more):
    """A process as torchrun starts it on a host."""
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(port),
        "PLAYGROUND_AUTHKEY": "secret",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": f"cable{rank}",
        **more,
    }
    return subprocess.Popen(
        [*before, sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
