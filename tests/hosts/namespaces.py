"""Makes hosts out of network namespaces: each has a name, an address and a link to a bridge."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

TOOLS = ("ip", "tc", "unshare", "hostname")
# Of the host alone: its name, and the numbers of its processes, by which ranks know each other.
OWN = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
SET_NAME = 'hostname "$0" && exec "$@"'


@attrs.frozen
class Host:
    """A network namespace that stands for a host.

    Args:
        number: Its position among the hosts.
        bridge: The bridge that joins all hosts.
    """

    number: int
    bridge: str

    @property
    def name(self) -> str:
        return f"{self.bridge}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.213.77.{self.number + 1}"

    @property
    def link(self) -> str:
        return f"{self.bridge}v{self.number}"

    @property
    def etc(self) -> Path:
        """Returns the folder whose files `ip netns exec` shows as those of /etc."""
        return Path("/etc/netns") / self.name

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs these words on this host.

        Whoever ends it kills all processes that it has started there.
        """
        return ["ip", "netns", "exec", self.name, *OWN, "sh", "-c", SET_NAME, self.name, *words]

    def set_link(self, state: str) -> None:
        """Sets the host's link to the bridge `up` or `down`."""
        _run(f"ip link set {self.link} {state}")

    def processes(self) -> list[int]:
        """Returns the numbers of the host's processes."""
        return list(map(int, _run(f"ip netns pids {self.name}").split()))


def missing() -> str:
    """Returns why hosts cannot be made here, or nothing."""
    absent = [each for each in TOOLS if shutil.which(each) is None]
    if absent:
        return f"there is no command {absent[0]}"
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "network namespaces need root" if allowed.returncode else ""


@contextmanager
def made(count: int, rate: str) -> Iterator[list[Host]]:
    """Makes hosts whose links carry at most `rate` (as tc writes it), and removes them."""
    bridge = f"sc{os.getpid() % 100000}"
    hosts = [Host(number, bridge) for number in range(count)]
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for host in hosts:
            _make(host, hosts, rate)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "link", "del", host.link], check=False)
            subprocess.run(["ip", "netns", "del", host.name], check=False)
            shutil.rmtree(host.etc, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def _make(host: Host, hosts: list[Host], rate: str) -> None:
    host.etc.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{each.address} {each.name}" for each in hosts)]
    (host.etc / "hosts").write_text("\n".join(lines) + "\n")
    inside, slow = f"ip -n {host.name}", f"root tbf rate {rate} burst 64kb latency 200ms"
    _run(f"ip netns add {host.name}")
    _run(f"ip link add {host.link} type veth peer name net0 netns {host.name}")
    _run(f"ip link set {host.link} master {host.bridge} up")
    _run(f"{inside} address add {host.address}/24 dev net0")
    _run(f"{inside} link set net0 up")
    _run(f"{inside} link set lo up")
    _run(f"tc qdisc add dev {host.link} {slow}")
    _run(f"tc -n {host.name} qdisc add dev net0 {slow}")


def _run(command: str) -> str:
    return subprocess.run(
        command.split(), check=True, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout
