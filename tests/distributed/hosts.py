"""Hosts with addresses and names of their own: network namespaces of this one, joined by a bridge (Linux, root)."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

NET = "10.213.77"  # of the hosts' addresses; .1 is the first one's
# Commands of a host see its own network, its own name, and a file with the names of all.
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Hosts:
    """Some hosts, which know one another by name.

    folder     for files of theirs
    names      host0, host1, ...; addresses: of them
    """

    def __init__(self, folder, count=2):
        self._folder = folder
        self.names = [f"host{number}" for number in range(count)]
        self._spaces = [f"hostdev{os.getpid()}-{number}" for number in range(count)]
        self.addresses = [f"{NET}.{number + 1}" for number in range(count)]
        self._bridge = f"hdev{os.getpid()}"

    def __enter__(self):
        if sys.platform != "linux" or shutil.which("ip") is None:
            pytest.skip("ip (iproute2) is not installed")
        if os.geteuid():
            pytest.skip("network namespaces need root")
        pairs = [("127.0.0.1", "localhost"), *zip(self.addresses, self.names, strict=True)]
        (self._folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in pairs))
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number, (space, address) in enumerate(zip(self._spaces, self.addresses, strict=True)):
                _ip("netns", "add", space)
                _ip("link", "add", f"{self._bridge}{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", f"{self._bridge}{number}", "master", self._bridge, "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    _ip("-n", space, "link", "set", interface, "up")
            subprocess.run([*self.on(0), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            said = getattr(error, "stderr", None) or str(error).encode()
            pytest.skip(f"no network namespaces here: {said.decode().strip()}")
        return self

    def __exit__(self, *_):
        for number, space in enumerate(self._spaces):
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                os.kill(int(pid), signal.SIGKILL)
            for what in (["netns", "del", space], ["link", "del", f"{self._bridge}{number}"]):
                subprocess.run(["ip", *what], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def on(self, number):
        """Return the beginning of a command that runs on this host."""
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, self.names[number], str(self._folder / "hosts")]
        return ["ip", "netns", "exec", self._spaces[number], *inside]

    def cut(self, number):
        """Take the cable from a host."""
        _ip("link", "set", f"{self._bridge}{number}", "down")

    def remote_shell(self):
        """Write a program that stands in for ssh, as mpirun calls it: HOST COMMAND ...; its path."""
        path = self._folder / "remote_shell"
        bare = shlex.join(["HOME=/root", f"PATH={os.defpath}:/usr/sbin:/sbin"])  # as a new login there has it
        cases = [
            f'{name}) exec env -i {bare} {shlex.join(self.on(number))} sh -c "$*" ;;'
            for number, name in enumerate(self.names)
        ]
        path.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *cases, "esac", ""]))
        path.chmod(0o755)
        return path


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
