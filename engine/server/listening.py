"""Where a server listens, and by which names it is called. This is known before a model is loaded."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence

from engine.errors import OptionError

BACKLOG = 1024  # connections that the system takes before the server does
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # as of IPv6 where the system has none
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII | re.IGNORECASE)


def listen(host: str, port: int) -> list[socket.socket]:
    """One for each address that `host` is a name of. port: 0 for any that is free. Raises `OptionError`."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--host {host!r:.100} is no address of this machine: {error}") from error
    sockets: list[socket.socket] = []
    try:
        for family, socket_type, protocol, _, (address, _, *scope) in dict.fromkeys(infos):
            opened = socket.socket(family, socket_type, protocol)
            sockets.append(opened)
            if hasattr(socket, "SO_REUSEPORT"):  # on Windows SO_REUSEADDR would share the port
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                opened.bind((address, port, *scope))
            except OSError as error:
                if error.errno not in _NOT_HERE or len(infos) == 1:
                    raise
                sockets.pop().close()
                continue
            opened.listen(BACKLOG)
            port = opened.getsockname()[1]
    except OSError as error:
        close(sockets)
        raise OptionError(_why_not(host, port, error)) from error
    if not sockets:
        raise OptionError(f"--host {host!r:.100} is no address of this machine")
    return sockets


def close(sockets: list[socket.socket]) -> None:
    for opened in sockets:
        opened.close()


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another process: choose another with --port, or 0 for any"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} is not for this user ({error.strerror}): choose one of 1024 or more with --port"
    return f"the server cannot listen at port {port} of {host}: {error.strerror}"


def host_name(host: str) -> str:
    """A name or an address without its port, as it is written shortest, an IPv6 address without brackets too; "" for
    what is neither."""
    match = _HOST.fullmatch(host)
    try:
        return str(ipaddress.IPv6Address(host if match is None else match[1] or match[2]))
    except ValueError:
        return "" if match is None or match[1] else match[2].lower().removesuffix(".")


def allowed_hosts(host: str, further: Sequence[str] = ()) -> tuple[str, ...] | None:
    """By which names a server may be called that listens at `host`: see `gate.Gate`. Raises `OptionError`."""
    names = list(map(host_name, further))
    if "" in names:
        wrong = further[names.index("")]
        raise OptionError(f"--allowed-host {wrong!r:.100} is no name of a host: give it without path and user")
    name = host_name(host)
    if name == "localhost" or _is_loopback(name):
        return (*LOOPBACK, name, *names)
    return tuple(names) or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
