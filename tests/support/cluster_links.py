"""The network between a node and what it talks to: PostgreSQL, Redis, its clients. Each
way can be cut by itself, in one direction or in both.

Where root allows, a node lives in a network namespace of its own, with a pair of
virtual interfaces for each way. Packets that are sent to a wrong hardware address are
lost without a word, as on a real network: the kernel repeats them, and nobody is told.
The addresses exist only in these namespaces, which have no way out, and end with the
process. Elsewhere a fault proxy swallows the bytes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from engines import Impossible, program
from proof.proxy import Proxy

T = TypeVar("T")
Peer = Literal["postgres", "redis", "clients"]
PEERS: tuple[Peer, ...] = ("postgres", "redis", "clients")
Way = Literal["to node", "from node", "both"]
WAYS: tuple[Way, ...] = ("to node", "from node", "both")
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that nobody has."""
_NEW_NETWORK = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Link(Protocol):
    """Between a node and one of its peers. Bytes are lost while it is cut."""

    def cut(self, way: Way) -> None: ...
    def heal(self) -> None: ...


@dataclass
class ProxyLink:
    """``node_connects``: the node opens the connections; to clients it does not."""

    proxy: Proxy
    node_connects: bool

    def cut(self, way: Way) -> None:
        from_node: Literal["up", "down"] = "up" if self.node_connects else "down"
        to_node: Literal["up", "down"] = "down" if self.node_connects else "up"
        one_way = {"to node": to_node, "from node": from_node, "both": None}[way]
        self.proxy.set(blackhole=True, one_way=one_way)

    def heal(self) -> None:
        self.proxy.set(blackhole=False, one_way=None)


@dataclass
class NamespaceLink:
    """Two interfaces. ``near`` is the address in the namespace of the tests."""

    node: int
    name: str
    near: str
    far: str

    def __post_init__(self) -> None:
        _ip(f"link add {self.name} type veth peer name {self.name} netns {path_of(self.node)}")
        for namespace, address in ((None, self.near), (self.node, self.far)):
            _ip(f"addr add {address}/30 dev {self.name}", namespace)
            _ip(f"link set {self.name} up", namespace)

    def cut(self, way: Way) -> None:
        if way != "from node":
            self._lose(self.far, None)
        if way != "to node":
            self._lose(self.near, self.node)

    def heal(self) -> None:
        """Both sides ask for each other's address again."""
        for namespace, address in ((None, self.far), (self.node, self.near)):
            _ip(f"neigh flush to {address} dev {self.name} nud all", namespace)

    def _lose(self, address: str, namespace: int | None) -> None:
        wrong = f"lladdr {NOWHERE} dev {self.name} nud permanent"
        _ip(f"neigh replace {address} {wrong}", namespace)


@dataclass
class NodePlace:
    """Where a node lives, and its links. ``namespace`` is a path; None: that of the
    tests.
    """

    links: Mapping[Peer, Link]
    host: str
    addresses: Mapping[Peer, tuple[str, int]]
    """Where the node finds its peers, and the clients find the node."""
    namespace: str | None = None


@dataclass
class Namespaces:
    """The namespaces of a cluster's nodes; see ``own_network``."""

    nodes: list[int] = field(default_factory=list)

    def place(self, ports: Mapping[Peer, int]) -> NodePlace:
        """A new namespace for a node whose peers, and who itself, have these ports."""
        number, namespace = len(self.nodes), in_thread(_new_namespace)
        self.nodes.append(namespace)
        _ip("link set lo up", namespace)
        links, addresses, host = {}, {}, ""
        for n, peer in enumerate(ports):
            near, far = (f"10.213.{number}.{4 * n + i}" for i in (1, 2))
            links[peer] = NamespaceLink(namespace, f"{peer}{number}", near, far)
            addresses[peer] = (far if peer == "clients" else near, ports[peer])
            host = far if peer == "clients" else host
        return NodePlace(links, host, addresses, path_of(namespace))


Links = Namespaces | Literal["proxies", "none"]


@contextmanager
def own_network() -> Iterator[Namespaces]:
    """This thread, and what it starts, is in a network of its own. Missing if this
    machine does not allow it.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    namespaces = Namespaces()
    try:
        program("ip", "iproute2")
        _new_network()
        try:
            _ip("link set lo up")
            yield namespaces
        finally:
            _enter(before)
    finally:
        for each in (before, *namespaces.nodes):
            os.close(each)


async def proxied_place(ports: Mapping[Peer, int], stack: AsyncExitStack) -> NodePlace:
    """The same by fault proxies."""
    links: dict[Peer, Link] = {}
    addresses: dict[Peer, tuple[str, int]] = {}
    for peer, port in ports.items():
        proxy = await stack.enter_async_context(Proxy("127.0.0.1", port))
        links[peer] = ProxyLink(proxy, node_connects=peer != "clients")
        addresses[peer] = ("127.0.0.1", proxy.port)
    return NodePlace(links, "127.0.0.1", addresses)


def direct_place(ports: Mapping[Peer, int]) -> NodePlace:
    """No link that could be cut."""
    return NodePlace({}, "127.0.0.1", {peer: ("127.0.0.1", port) for peer, port in ports.items()})


def in_thread(act: Callable[[], T]) -> T:
    """In a thread of its own: it may enter another namespace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act).result()


def path_of(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def enter(path: str) -> None:
    """This thread goes on in that network; no right is needed if it is there already."""
    if Path(path).samefile("/proc/thread-self/ns/net"):
        return
    namespace = os.open(path, os.O_RDONLY)
    _enter(namespace)
    os.close(namespace)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _new_network() -> None:
    if _libc.unshare(_NEW_NETWORK):
        raise Impossible("a network namespace needs root: " + os.strerror(ctypes.get_errno()))


def _new_namespace() -> int:
    _new_network()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _ip(command: str, namespace: int | None = None) -> None:
    """``ip`` here, or in another namespace."""

    def run() -> None:
        if namespace is not None:
            _enter(namespace)
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    in_thread(run)
