"""Workers on several hosts: how they meet, whose clock is right, and what happens when one is lost."""

import signal
import socket
import time
from threading import Thread

import pytest

from engine.errors import EngineError
from engine.parallel.launch import Torchrun, _connected, _meet, free_port, gathered, secret
from engine.parallel.supervise import Inbox, RemoteClock
from engine.parallel.worker import Seat
from tests.engine.parallel.hosts import start, two_hosts

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}

DRIVER = """
import os
from engine.parallel.backend import ParallelBackend
from engine.parallel.launch import Torchrun, gathered, secret
from engine.parallel.layout import Layout
from tests.engine.parallel.crews import *
hire = gathered(Torchrun.here(os.environ), secret(os.environ), 30.0, COMMAND)
backend = ParallelBackend(config(Layout(stages=2), rank=1, step=4, act=os.environ["ACT"], delay=0.01), hire)
print("ready", flush=True)
backend.launch(prefill(0))
try:
    for step in range(1, 8):
        done = backend.wait()
        assert [done.stages[0][1] <= done.stages[1][0] < done.finished + 1e-9 < backend.now()] == [True]
        print(backend._crew._peers[1].offset, flush=True)
        backend.launch(decode(step, len(PROMPT) + step - 1))
finally:
    backend.close()
"""

FOLLOWER = """
import os, sys
from engine.parallel.launch import Torchrun, follow, secret
from tests.engine.parallel.fake_worker import FakeBackend
code = follow(Torchrun.here(os.environ), secret(os.environ), 30.0, FakeBackend)
os._exit(code)
"""


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as commands:
        if commands is None:
            pytest.skip("needs network namespaces: root, and `ip`")
        yield commands


def pair(hosts, port, act, **more):
    driver = start(hosts[0], DRIVER, 0, 2, port, ACT=act)
    follower = start(hosts[1], FOLLOWER, 1, 2, port, **more)
    return driver, follower


def test_a_pipeline_over_two_hosts_one_of_which_is_lost(hosts):
    driver, follower = pair(hosts, 29612, "die")
    try:
        out, errors = driver.communicate(timeout=60)
        # It is one machine, so the clocks are the same: the estimate is wrong by half of a round trip at most.
        assert abs(float(out.split()[-1])) < 2e-3
        assert "rank 1 (stage 1) is gone: its process or its host went down" in errors
        assert "it was in step 4, the last step it finished was 3" in errors
        assert follower.wait(5) == -9
    finally:
        driver.kill()
        follower.kill()


def test_another_secret(hosts):
    driver, follower = pair(hosts, 29614, "none", PLAYGROUND_AUTHKEY="another")
    try:
        _, errors = follower.communicate(timeout=20)
        assert "PLAYGROUND_AUTHKEY: the driver at 10.213.7.1 has another secret; give all hosts the same" in errors
    finally:
        driver.kill()
        follower.kill()


def test_a_driver_that_is_lost(hosts):
    driver, follower = pair(hosts, 29613, "sleep")
    try:
        assert driver.stdout.readline() == "ready\n"
        follower.send_signal(signal.SIGINT)  # torchrun passes it on to everybody: the driver decides
        for _ in range(4):
            assert driver.stdout.readline()
        time.sleep(0.2)  # the follower is in the middle of a step
        driver.kill()
        assert follower.wait(5) == 70
    finally:
        driver.kill()
        follower.kill()


def test_torchrun():
    assert Torchrun.here({}) is None
    assert Torchrun.here(ENVIRONMENT) == Torchrun(Seat(3, 0, 1), 4, "node0", 29501)
    there = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PLAYGROUND_PORT": "5"}
    assert Torchrun.here(ENVIRONMENT | there) == Torchrun(Seat(3, 1, 2), 4, "node0", 5)


def test_a_driver_that_does_not_come():
    nobody = Torchrun(Seat(1, 0, 1), 2, "127.0.0.1", free_port("127.0.0.1"))
    with pytest.raises(EngineError, match=r"^MASTER_ADDR=127.0.0.1, PLAYGROUND_PORT=\d+: no driver is there .*; start"):
        _connected(nobody, time.monotonic() + 0.2)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        here = Torchrun(Seat(0, 0, 1), 2, "127.0.0.1", server.getsockname()[1])
        with pytest.raises(EngineError, match=r"^PLAYGROUND_PORT=\d+: Address already in use.*; set it to a port"):
            gathered(here, b"secret", 1.0)()


def test_secret(tmp_path):
    (tmp_path / "key").write_text(" abc\n")
    (tmp_path / "empty").write_text("\n")
    assert secret({"PLAYGROUND_AUTHKEY": "x"}) == b"x"
    assert secret({"PLAYGROUND_AUTHKEY_FILE": str(tmp_path / "key")}) == b"abc"
    for environment, said in (
        ({}, "^PLAYGROUND_AUTHKEY_FILE: not set; write a secret"),
        (
            {"PLAYGROUND_AUTHKEY_FILE": "/none"},
            "^PLAYGROUND_AUTHKEY_FILE=/none: No such file or directory; give a file",
        ),
        ({"PLAYGROUND_AUTHKEY_FILE": str(tmp_path / "empty")}, "the file is empty; write a secret into it"),
    ):
        with pytest.raises(EngineError, match=said):
            secret(environment)


def test_ranks_that_do_not_come_are_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(EngineError, match=r"^parallel.patience=0.2: no word from ranks 1, 2 of 3 in so many seconds;"),
    ):
        _meet(server, 3, b"secret", 0.2)


def test_strangers_are_sent_away(monkeypatch):
    """Whoever does not know the secret is nobody: here one that says something, and one that says nothing."""
    monkeypatch.setattr("engine.parallel.launch.STUCK", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def knock():
            with socket.create_connection(address) as stranger:
                stranger.sendall(b"\x00\x00\x00\x05hello" * 3)
                time.sleep(0.1)
            with socket.create_connection(address):
                time.sleep(2.0)

        knocking = Thread(target=knock)
        knocking.start()
        with pytest.raises(EngineError, match="no word from ranks 1 of 2"):
            began = time.monotonic()
            _meet(server, 2, b"secret", 0.6)
        assert time.monotonic() - began < 1.5
        knocking.join()


def test_a_remote_clock():
    """The quickest answer counts: it leaves the least room for error."""
    clock = RemoteClock()
    clock.sample(1.0, 101.4, 1.5)  # 0.25 s to and fro at best; the answer was slow
    clock.sample(2.0, 102.001, 2.002)
    clock.sample(3.0, 103.3, 3.4)
    assert clock.offset == pytest.approx(100.0)
    for _ in range(30):  # clocks drift apart: what is old is forgotten
        clock.sample(4.0, 105.005, 4.01)
    assert clock.offset == pytest.approx(101.0)


def test_messages_in_pieces():
    from multiprocessing.connection import Connection

    ours, theirs = socket.socketpair()
    line, inbox = Connection(theirs.detach()), None
    reader = Connection(ours.detach())
    inbox = Inbox(reader)
    messages = [b"", b"abc", bytes(70_000), b"z"]
    sender = Thread(target=lambda: [line.send_bytes(message) for message in messages] and line.close())
    sender.start()
    got = []
    with pytest.raises(EOFError):
        while True:
            got += inbox.read()
    sender.join()
    reader.close()
    assert got == messages
