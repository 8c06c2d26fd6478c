"""What a connection may cost before a request is there: uvicorn with h11 limits the size of its head, this its time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED = 128  # connections at once: each of these is a file before it is counted
HEAD_BYTES = 2**16  # of a request line and its headers
_REQUEST_S = 35.0  # from the connection, or from the answer before, to the end of the request
_READING_S = 60.0  # for a client that does not take what it was sent
_LATE, _FULL = (
    b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
    for status in (b"408 Request Timeout", b"503 Service Unavailable")
)
_OTHER_FILES = 128  # that the process may have open


def most_connections() -> int:
    """As many as the process may have files for; those that wait to be accepted come at once."""
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        return 512
    limit = 2048 if files == resource.RLIM_INFINITY else min(2048, files - ACCEPTED - _OTHER_FILES)
    return max(16, limit)


class Connection(H11Protocol):
    """Closes itself where a request does not come in time, and where an answer is not read.

    Where there are more than `most` connections, the one goes that has waited longest for its request or the rest of
    it: others get through, however many are opened and left alone.
    """

    most = most_connections()
    _deadline: asyncio.TimerHandle | None = None  # of the request that is awaited
    _reading: asyncio.TimerHandle | None = None  # of the client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self.most:
            waiting = [
                connection
                for connection in self.connections
                if isinstance(connection, Connection) and connection._deadline is not None
            ]
            longest = min(waiting, key=_deadline_of)
            longest._end(_FULL if longest is self else _LATE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body):
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(_READING_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().resume_writing()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(_REQUEST_S, self._end, _LATE)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, response: bytes) -> None:
        """response: to a client that never had an answer."""
        self._stop_waiting()
        if self.cycle is not None:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()


def _deadline_of(connection: Connection) -> float:
    assert connection._deadline is not None
    return connection._deadline.when()
