"""Ports for the servers and rendezvous that tests start."""

import random
import socket

# Below Linux's ephemeral ports (32768 and up): an outgoing connection of another test never takes one of these
# between the moment it is drawn and the moment the test's process listens there.
_RANGE = range(20_000, 32_000)
_entropy = random.SystemRandom()


def free_port():
    """Return a port without a listener."""
    while True:
        port = _entropy.choice(_RANGE)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
