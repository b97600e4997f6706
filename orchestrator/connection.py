"""One SSH connection to a host that many sessions share, and every failure told as what it is.

paramiko and fabric are imported when it is made: that takes 0.2 s.
"""

from __future__ import annotations

import contextlib
import getpass
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator import head_start, login_failure, pct
from orchestrator.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DflashctlError,
    HostUnreachable,
)
from orchestrator.route import CONNECT_S, find_route

if TYPE_CHECKING:
    import paramiko
    from fabric import Connection

    from orchestrator.target import HostTarget

# A login that was cut is tried again: nothing has been asked of the host yet. Only twice: a host
# that ends each one has seen enough keys, and may lock us out.
LOGIN_AGAIN_S = (1.0, 2.0)
# After this a person wants to know what is waited for.
PATIENCE_S = 1.0
# sshd's MaxSessions is 10 by default; two are left to the user's own terminals.
CHANNELS = 8
# sshd counts a session until its processes are gone, a moment after we have closed it.
CROWDED_S = (0.05, 0.1, 0.2, 0.5, 1.0)
# `sendall` of 64 MB took 31 s: it copies the rest at each step. In these pieces it takes 1 s. Each
# is four packets: sshd takes 32 KiB, and paramiko keeps 64 bytes of it.
PIECE = 4 * (32 * 1024 - 64)
# What a login shell must run, and hand its input on to.
SHELL_MARK = b"dflashctl-asks-the-shell\n"
SHELL_INPUT = b"dflashctl-hands-this-on\n"
SHELL_ASKED = ("sh", "-c", f"echo {SHELL_MARK.decode().strip()}; cat")
SHELL_S = 5.0

Notice = Callable[[str], None]
"""Tells a person one line."""


class HostConnection:
    """The one connection to a host that all its containers share. Opened by the first session."""

    def __init__(
        self,
        host: HostTarget,
        *,
        ask: bool = False,
        notice: Notice = lambda text: None,
        waiting: Notice = lambda text: None,
    ) -> None:
        """:param ask: prompt for a password where one is needed and a person is there.
        :param notice: told of each new attempt.
        :param waiting: told once that the host is slow to answer.
        """
        self.host = host
        self._ask = ask
        self._notice = notice
        self._waiting = waiting
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._channels = threading.BoundedSemaphore(CHANNELS)
        self._connection: Connection | None = None
        self._failure: tuple[float, DflashctlError] | None = None
        self._begun: head_start.HeadStart | None = None

    def __enter__(self) -> HostConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> Connection:
        """The open connection, made by whoever comes first.

        :raises UnreachableError: with the reason and the next step.
        """
        asked = time.monotonic()
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection
            if self._failure is not None and self._failure[0] > asked:
                # Fifty containers of a dead host wait for one time-out, not for fifty. But where a
                # thread was refused that may not ask, the one that may still can.
                failure = self._failure[1]
                if not isinstance(failure, AuthenticationFailed) or not self._can_ask():
                    raise failure
            try:
                self._connection = self._connect()
                if self._closing.is_set():
                    _close(self._connection)
                    raise self.lost()
            except DflashctlError as error:
                if self.host.near and isinstance(error, HostUnreachable):
                    meant = f"did you mean {self.host.near!r}, which the inventory has? Else "
                    error.next_step = meant + error.next_step
                self._failure = (time.monotonic(), error)
                raise
            return self._connection

    def session(self, argv: Sequence[str]) -> Session:
        """Run ``argv`` on the host; waits while the host's channels are all in use."""
        self._channels.acquire()
        try:
            return Session(self._start(pct.shell_line(argv)), self._channels.release)
        except BaseException:
            self._channels.release()
            raise

    @property
    def user(self) -> str:
        """Whom it is logged in as; of one that is not open, whom the inventory names."""
        connection = self._connection
        return str(connection.user) if connection else self.host.settings.user or "root"

    def shell_runs(self) -> bool | None:
        """Whether the login shell runs what it is given and leaves it its input; None where that
        cannot be told."""
        with self._lock:
            connection = self._connection
        if connection is None:
            return None
        from orchestrator.login import start_session

        heard = bytearray()
        try:
            # Beside the host's channels: whoever asks holds one of them.
            channel = start_session(connection.transport, pct.shell_line(SHELL_ASKED))
            # A shell that exits at once has closed it before: what it printed is there to read.
            with contextlib.suppress(OSError):
                channel.sendall(SHELL_INPUT)
                # What a shell has become that does not run it ends with its input.
                channel.shutdown_write()
            channel.settimeout(SHELL_S)
            while piece := channel.recv(64 * 1024):
                heard += piece
            channel.close()
        except Exception:  # noqa: BLE001 - paramiko's or the system's: it is only a look
            return None
        if not connection.transport.is_active():
            return None
        return SHELL_INPUT in heard.partition(SHELL_MARK)[2]

    def close(self) -> None:
        self._closing.set()
        # Whoever is still connecting holds it for many seconds, and closes what he gets himself.
        if self._lock.acquire(timeout=0.2):
            try:
                connection, self._connection = self._connection, None
            finally:
                self._lock.release()
            _close(connection)

    def _start(self, line: str) -> paramiko.Channel:
        connection = self.open()
        for pause in LOGIN_AGAIN_S:
            try:
                return self._start_on(connection, line)
            except ConnectionLost as error:
                self._tell_again(error, pause)
            # Which has attempts of its own.
            connection = self.open()
        return self._start_on(connection, line)

    def _start_on(self, connection: Connection, line: str) -> paramiko.Channel:
        import paramiko

        from orchestrator.login import start_session

        begun = self._begun.channel(line) if self._begun else None
        if begun is not None:
            return begun
        for pause in (*CROWDED_S, None):
            try:
                return start_session(connection.transport, line)
            except (paramiko.SSHException, OSError, EOFError) as error:
                if not _refused_a_session(error) or not connection.transport.is_active():
                    raise self.lost(error) from None
                if pause is None:
                    raise HostUnreachable(
                        f"the host allows no further session ({error})",
                        next_step="close other sessions, or raise MaxSessions in its sshd_config",
                        host=self.host.name,
                    ) from None
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _tell_again(self, error: ConnectionLost, pause: float) -> None:
        """:raises ConnectionLost: ``error``, where nobody waits for it any more."""
        if self._closing.is_set():
            raise error
        self._notice(f"{error.where}: {error.what}; trying again in {pause:.0f} s")
        self._closing.wait(pause)

    def lost(self, error: BaseException | None = None) -> ConnectionLost | HostUnreachable:
        """The link went away under us, or is too slow for a session."""
        if str(error).startswith("Timeout opening channel"):
            return HostUnreachable(
                f"the host opened no session within {CONNECT_S} s",
                next_step=login_failure.SLOW,
                host=self.host.name,
            )
        reason = f": {error}" if error and str(error) else ""
        return ConnectionLost(
            f"the connection was lost{reason}",
            next_step="a run goes on without it; `dflashctl status` shows it once the host answers",
            host=self.host.name,
        )

    def _connect(self) -> Connection:
        """:raises UnreachableError: with the reason and the next step."""
        slow = threading.Timer(PATIENCE_S, self._waiting, [f"connecting to {self.host.name} …"])
        slow.daemon = True
        slow.start()
        try:
            for pause in LOGIN_AGAIN_S:
                try:
                    return self._log_in()
                except ConnectionLost as error:
                    self._tell_again(error, pause)
            try:
                return self._log_in()
            except ConnectionLost as error:
                # Whoever tries again what was cut under its work is not to begin with this anew.
                raise HostUnreachable(
                    error.what, next_step=error.next_step, host=error.host
                ) from error
        finally:
            slow.cancel()

    def _log_in(self) -> Connection:
        self._begun = begun = head_start.take(self.host)
        route = begun.route() if begun else find_route(self.host)
        import paramiko

        from orchestrator.login import dial

        try:
            return begun.connection() if begun else dial(route, self.host.name)
        except paramiko.AuthenticationException as error:
            if not login_failure.is_verdict(error) or not self._can_ask():
                raise login_failure.explain(error, route, self.host.name) from error
            secret = getpass.getpass(f"password or passphrase for {route.user}@{route.place}: ")
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise login_failure.explain(error, route, self.host.name) from error
        try:
            return dial(route, self.host.name, secret)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise login_failure.explain(error, route, self.host.name) from error

    def _can_ask(self) -> bool:
        # In the main thread only: Ctrl-C at a prompt elsewhere would leave the terminal mute.
        main = threading.current_thread() is threading.main_thread()
        return self._ask and main and sys.stdin.isatty() and sys.stderr.isatty()


def _close(connection: Connection | str | None) -> None:
    """It and the gateways under it."""
    while connection is not None and not isinstance(connection, str):
        connection.close()
        connection = connection.gateway


def _refused_a_session(error: BaseException) -> bool:
    """Of several threads that are refused at once, paramiko tells only one the reason."""
    import paramiko

    return isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel."


class Session:
    """One command on the host: raw bytes both ways. Its reader must drain both streams."""

    def __init__(self, channel: paramiko.Channel, on_close: Callable[[], None]) -> None:
        self._channel = channel
        self._on_close = on_close
        self._closed = threading.Lock()

    def send(self, data: bytes | memoryview) -> None:
        """All of ``data``, in pieces; blocks while the far side's window is full.

        :raises OSError: the session ended.
        """
        view = memoryview(data)
        for start in range(0, len(view), PIECE):
            self._channel.sendall(bytes(view[start : start + PIECE]))

    def receive(self) -> bytes:
        """The next bytes of its output; empty at its end."""
        return self._channel.recv(256 * 1024)

    def receive_error(self) -> bytes:
        """The next bytes of its error output; empty at its end."""
        return self._channel.recv_stderr(64 * 1024)

    def finish_input(self) -> None:
        """End of input, which the agent takes as its sign to leave."""
        self._channel.shutdown_write()

    def status(self, timeout: float) -> int | None:
        """The exit status once it is known; None where the link broke or time ran out."""
        # `recv_exit_status` has no time-out of its own.
        if not self._channel.status_event.wait(timeout):
            return None
        status = self._channel.recv_exit_status()
        return None if status < 0 else status

    def close(self) -> None:
        if self._closed.acquire(blocking=False):
            # The connection under it may be gone already.
            with contextlib.suppress(OSError, EOFError):
                self._channel.close()
            self._on_close()
