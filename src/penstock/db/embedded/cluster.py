"""PGDATA: its owner, its version, how it is created. Used by the keeper process alone.

Like the keeper, it imports only light modules of the standard library.
"""

# pathlib and contextlib would make the keeper larger and slower to start.
# ruff: noqa: PTH102, PTH104, PTH114, PTH116, PTH123, PTH208, SIM105

from __future__ import annotations

import os
import pwd
import signal
import time
from stat import S_IFDIR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RESERVE = "room-for-deletions"
LOG = "postgres.log"
PGDATA = "pg"
ROLE = "penstock"
TAIL_CHARS = 2_000
WAL_SEGMENT_BYTES = 16 * 1024 * 1024
CLONE_NEWUSER = 0x10000000


class StartError(Exception):
    """The server cannot be brought up; the texts go to the person who asked for it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def log(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} keeper[{os.getpid()}]: {text}\n"
    try:
        os.write(2, line.encode(errors="replace"))
    except OSError:
        pass  # a full disk is no reason for the keeper to go as well


class Identity:
    """User that PostgreSQL runs as: it refuses to run as root."""

    def __init__(self, uid: int, gid: int, how: str) -> None:
        self.uid = uid
        self.gid = gid
        self.how = how
        """`same`: as we are. `switch`: setuid. `namespace`: our root, named `uid` in a user namespace."""

    @property
    def owner(self) -> tuple[int, int]:
        """Owner that its directories must have, seen from outside."""
        return (self.uid, self.gid) if self.how == "switch" else (os.geteuid(), os.getegid())

    def become(self) -> None:
        """Switch to this identity; in a forked child, before exec."""
        if self.how == "switch":
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
        elif self.how == "namespace":
            self._enter_namespace()

    def _enter_namespace(self) -> None:
        # File access stays that of root as an owner, without root's power over everybody else's files:
        # enough for a directory under a private home, and nobody's modes need to change.
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "no user namespace")
        maps = ("setgroups", "deny"), ("uid_map", f"{self.uid} 0 1"), ("gid_map", f"{self.gid} 0 1")
        for name, text in maps:
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(fd, text.encode())
            os.close(fd)


def spawn(
    argv: list[str], identity: Identity, *, cwd: str = "/", stdin: int = -1, output: int = -1, keep: int = -1
) -> int:
    """Fork and exec. Nothing is imported or read once the child has changed identity, except by the kernel:
    the Python installation may be closed to the user that PostgreSQL runs as."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if stdin >= 0:
            os.dup2(stdin, 0)
        if output >= 0:
            os.dup2(output, 1)
            os.dup2(output, 2)
        identity.become()
        os.chdir(cwd)
        if keep >= 0:
            os.set_inheritable(keep, True)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
        os.execv(argv[0], argv)  # noqa: S606
    except BaseException as error:  # a forked child must never return into the keeper
        os.write(2, f"{argv[0]}: {error}\n".encode())
    finally:
        os._exit(126)


def run(argv: list[str], identity: Identity, *, cwd: str = "/", stdin: bytes = b"") -> tuple[int, str]:
    """Run a short command; returns its exit status and all its output."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    os.write(in_write, stdin)
    os.close(in_write)
    pid = spawn(argv, identity, cwd=cwd, stdin=in_read, output=out_write)
    os.close(in_read)
    os.close(out_write)
    output = b""
    while chunk := os.read(out_read, 65536):
        output += chunk
    os.close(out_read)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode(errors="replace")


class Cluster:
    """PGDATA: its owner, its version, and how it is created."""

    def __init__(self, data_dir: str, bin_dir: str) -> None:
        self.data_dir = data_dir
        self.bin_dir = bin_dir
        self.pgdata = f"{data_dir}/{PGDATA}"
        self.identity = self._choose_identity()

    def _choose_identity(self) -> Identity:
        uid, gid = os.geteuid(), os.getegid()
        if uid != 0:
            return Identity(uid, gid, "same")
        # Some name must exist for the number in the namespace: initdb asks for it.
        nobody = _account("nobody") or Identity(65534, 65534, "switch")
        namespace = Identity(nobody.uid, nobody.gid, "namespace")
        try:
            made = os.stat(self.pgdata)
        except FileNotFoundError:
            parent = os.stat(self.data_dir)
            candidates = [_account("postgres") or nobody, namespace]
            if parent.st_uid != 0:  # sudo in somebody's private home
                candidates.append(Identity(parent.st_uid, parent.st_gid, "switch"))
            return self._first_usable(candidates)
        return Identity(made.st_uid, made.st_gid, "switch") if made.st_uid != 0 else namespace

    def _first_usable(self, candidates: list[Identity]) -> Identity:
        # Tried rather than computed from mode bits: this also counts ACLs, noexec, missing libraries and
        # kernels without user namespaces.
        for candidate in candidates:
            if run([f"{self.bin_dir}/postgres", "--version"], candidate, cwd=self.data_dir)[0] == 0:
                return candidate
        raise StartError(
            "PostgreSQL does not run as root, and no other user was found that can enter both "
            f"{self.data_dir} and {self.bin_dir}",
            "Run Penstock as an ordinary user, choose a --data-dir that others may enter (such as "
            "/var/lib/penstock), or give --database-url.",
        )

    def binary_major(self) -> int:
        status, text = run([f"{self.bin_dir}/postgres", "--version"], self.identity)
        if status != 0:
            raise StartError(f"{self.bin_dir}/postgres does not run: {text}", "Is it made for this system?")
        return int("".join(c if c.isdigit() else " " for c in text).split()[0])

    def data_major(self) -> int | None:
        try:
            with open(f"{self.pgdata}/PG_VERSION", "rb") as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return None

    def make(self) -> None:
        """Create PGDATA beside its place and move it there whole: a kill leaves all of it or nothing."""
        for name in os.listdir(self.data_dir):
            if name.startswith(f"{PGDATA}.new-"):
                _remove_tree(f"{self.data_dir}/{name}")
        made = f"{self.data_dir}/{PGDATA}.new-{os.getpid()}"
        make_private_dir(made, self.identity)
        # Bytewise order, since ids and keys are compared far more often than shown. No --no-sync: one
        # fsync of the whole costs under a tenth of a second, once.
        locale = ["--encoding=UTF8", "--locale=C"]
        if self.binary_major() >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        initdb = [f"{self.bin_dir}/initdb", "-D", made, f"--username={ROLE}", "--auth=trust"]
        single = [f"{self.bin_dir}/postgres", "--single", "-j", "-D", made, "postgres"]
        self._run_or_remove(made, [*initdb, *locale, "--data-checksums"], b"")
        self._run_or_remove(made, single, f"CREATE DATABASE {ROLE}".encode())
        os.rename(made, self.pgdata)
        parent = os.open(self.data_dir, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

    def _run_or_remove(self, made: str, argv: list[str], stdin: bytes) -> None:
        status, output = run(argv, self.identity, stdin=stdin)
        if status != 0:
            _remove_tree(made)
            log(output)
            raise self.explain("\n".join(output.splitlines()[-6:]))

    def explain(self, tail: str) -> StartError:
        """Explain why the server did not start, from the end of its log."""
        made, here = self.data_major(), self.binary_major()
        if made is not None and made != here:
            return StartError(
                f"{self.pgdata} was made by PostgreSQL {made}; this is PostgreSQL {here}",
                f"Dump it with PostgreSQL {made}'s pg_dump and restore it into a new --data-dir.",
            )
        # Kernel limits use the same words. And the log is on the same disk: what the server had to say
        # may not have fitted any more.
        said = [line for line in tail.splitlines() if "No space left on device" in line]
        full = any("shared memory" not in line and "semaphores" not in line for line in said)
        space = os.statvfs(self.data_dir)
        if full or space.f_bavail * space.f_frsize < WAL_SEGMENT_BYTES:
            return StartError(
                f"the disk that holds {self.data_dir} is full",
                "Free some space and run again: nothing that was committed is lost.",
            )
        return StartError(
            f"PostgreSQL did not start in {self.data_dir}:\n{tail or 'it said nothing'}",
            f"The whole log is {self.data_dir}/{LOG}.",
        )


def _account(name: str) -> Identity | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Identity(entry.pw_uid, entry.pw_gid, "switch")


def make_private_dir(path: str, identity: Identity) -> None:
    """Everyone who reaches the socket is let in, so its directory must be ours alone, and really ours."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(path)
    # Root's own counts: a kill may have come between making it and giving it away.
    if found.st_mode != S_IFDIR | 0o700 or found.st_uid not in (identity.owner[0], os.geteuid()):
        raise StartError(
            f"{path} exists, but is not a private directory of the user that PostgreSQL runs as",
            "Remove it and run again.",
        )
    if found.st_uid != identity.owner[0]:
        os.chown(path, *identity.owner)


def _remove_tree(root: str) -> None:
    for folder, folders, files in os.walk(root, topdown=False):
        for name in files:
            _try_to(os.unlink, f"{folder}/{name}")
        for name in folders:
            path = f"{folder}/{name}"
            _try_to(os.unlink if os.path.islink(path) else os.rmdir, path)
    _try_to(os.rmdir, root)


def _try_to(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except OSError:
        pass  # an orphaned initdb may still write here; the next start sweeps again
