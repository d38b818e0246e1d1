"""Several processes, on one machine or on many, that train one model together.

All run the same command. Process 0 alone reads and writes the folder of the run, and prints; the
others are told by it what they need, so that they need not see its disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import jax
import numpy as np

import threads
from lavajax import leaves
from lavajax.sharding import check_processes
from lavajax.types import PyTree

HEARTBEAT_SECONDS = 20  # a process that is not heard from for so long is dead
CONNECT_SECONDS = 120  # for all of them to start
LEAVE_SECONDS = 60
MEET_SECONDS = 24 * 3600  # while one reads data or writes a file; one that dies is missed before
_MUST = "every one of them must run, and reach the port of process 0"
_LOSS = ("gloo", "nccl", "coordination", "unavailable", "connection", "heartbeat")
"""What the messages of errors have where a process cannot be reached."""
# Waits for the end of the process that started it. JAX ends a process that has lost another from a
# thread of its own, by an abort that Python never sees: somebody else must say what that was.
_WATCH = """
import sys
text = sys.stdin.read()
if not text.endswith("\\0"):
    sys.stderr.write(text.rsplit("\\n\\n", 1)[-1] + "\\n")
"""


@dataclasses.dataclass(frozen=True)
class Machines:
    """How the processes find each other; all None and False for a process alone.

    Attributes:
        coordinator: host and port of process 0.
        processes: how many there are.
        process: which of them this one is, from 0 on.
        detect: ask the cluster for these: SLURM, a TPU, Kubernetes.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    detect: bool = False


def split(args: Sequence[str]) -> tuple[Machines, list[str]]:
    """The options of processes on a command line, and what is left of it.

    Raises:
        ValueError: one is missing or impossible.
        SystemExit: one has no value.
    """
    parser = argparse.ArgumentParser(prog="run.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--distributed", action="store_true")
    found, rest = parser.parse_known_args(args)
    given = (found.coordinator, found.processes, found.process)
    if found.distributed and given != (None, None, None):
        raise ValueError(
            "--distributed asks the cluster for what --coordinator, --processes and --process say: "
            "give one or the other"
        )
    if given == (None, None, None):
        return Machines(detect=found.distributed), rest
    if None in given:
        raise ValueError("--coordinator, --processes and --process must be given together")
    host, _, port = found.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator must be HOST:PORT, got {found.coordinator}")
    if found.processes < 1:
        raise ValueError(f"--processes must be at least 1, got {found.processes}")
    if not 0 <= found.process < found.processes:
        raise ValueError(f"--process must be from 0 to {found.processes - 1}, got {found.process}")
    return Machines(*given), rest


class Peers:
    """This process among the others, or alone."""

    def __init__(self, machines: Machines = Machines()) -> None:
        """Joins the others, before any backend of JAX starts.

        Raises:
            ValueError: there is no cluster to ask, the others cannot be reached, or one has more
                devices than another.
        """
        self._joined = machines != Machines()
        self._watch: IO[str] | None = None
        self._meetings = 0
        self.number = 0
        if not self._joined:
            return
        watcher = subprocess.Popen(
            [sys.executable, "-c", _WATCH],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is not for it
        )
        self._watch = watcher.stdin
        self._prepare(
            f"this process ended before it joined the others: within {CONNECT_SECONDS} s {_MUST}"
        )
        # Unless it is told all, JAX takes what a cluster has set, such as one device for a process.
        detection = None if machines.detect else "deactivate"
        try:
            jax.distributed.initialize(
                machines.coordinator,
                machines.processes,
                machines.process,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                initialization_timeout=CONNECT_SECONDS,
                shutdown_timeout_seconds=LEAVE_SECONDS,
                cluster_detection_method=detection,
            )
        except (ValueError, RuntimeError) as error:
            self._forget()
            raise ValueError(f"the processes could not be joined: {error}; {_MUST}") from None
        self.number = jax.process_index()
        self.on_loss("start all of them again")
        if jax.default_backend() == "gpu" and not threads.CACHE_NAMED:
            # What process 0 has on a disk of its own, the others compile; there XLA waits for the
            # share of process 0 in its autotuning, which never comes.
            jax.config.update("jax_enable_compilation_cache", False)
        try:
            check_processes()
        except ValueError:  # on all of them
            self.leave()
            raise

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.number == 0

    @property
    def joined(self) -> bool:
        """Whether there are others, who have not parted yet."""
        return self._joined

    def misses(self, error: Exception) -> bool:
        """Whether an error tells that another process has died or cannot be reached.

        Whichever comes first ends this one: such an error of the transport, or JAX's abort.
        """
        return self._joined and any(word in str(error).lower() for word in _LOSS)

    def on_loss(self, advice: str) -> None:
        """What is said, by a process of its own, where this one ends before it parts."""
        self._prepare(
            f"process {self.number} has ended: it was killed, or another of the processes has died "
            f"or cannot be reached; {advice}"
        )

    def meet(self) -> None:
        """Waits until all of them are here.

        What their devices do together waits for half a minute only, on a CPU.
        """
        if self._joined:
            from orbax.checkpoint import multihost  # type: ignore[import-untyped]

            self._meetings += 1
            key = f"lavajax/{self._meetings}"  # which none may have had before
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * MEET_SECONDS)

    def share(self, value: Any) -> Any:
        """What process 0 gives, which JSON can hold, on all of them."""
        if not self._joined:
            return value
        return json.loads(self._share(json.dumps(value).encode()))

    def share_state(self, state: PyTree | None, like: PyTree) -> Any:
        """The pytree of process 0, bit for bit, on all of them; None where it has none."""
        if not self._joined:
            return state
        entries, arrays = ({}, {}) if state is None else leaves.pack(state)
        entries = self.share(entries if state is not None else None)
        data = self._share(b"".join(array.tobytes() for array in arrays.values()))
        if entries is None:
            return None
        found, place = {}, 0
        for name, entry in entries.items():
            shape, dtype = leaves.stored(entry)
            count = int(np.prod(shape, dtype=int))
            found[name] = np.frombuffer(data, dtype, count, place).reshape(shape)
            place += found[name].nbytes
        return leaves.unpack(like, entries, found)

    def most(self, number: int | None) -> int | None:
        """The largest number that a process gives; None where none of them does."""
        if not self._joined:
            return number
        from jax.experimental import multihost_utils

        self.meet()
        own = np.array(-1 if number is None else number, np.int32)
        largest = int(np.max(multihost_utils.process_allgather(own)))
        return None if largest < 0 else largest

    def leave(self) -> None:
        """Parts from the others, who do the same now; then this process may end when it likes."""
        if self._joined:
            self.meet()
            jax.distributed.shutdown()
            self._forget()

    def abandon(self, code: int, *, lost: bool = False) -> int:
        """Ends this process without waiting for the others, who will miss it; alone, returns.

        Args:
            code: the exit code.
            lost: whether another is missed, which is then said.
        """
        if self._joined:
            if not lost:
                self._forget()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _prepare(self, text: str) -> None:
        if self._watch is not None:
            self._watch.write(f"\n\nerror: {text}")
            self._watch.flush()

    def _forget(self) -> None:
        self._joined = False
        if self._watch is not None:
            self._watch.write("\0")
            self._watch.close()
            self._watch = None

    def _share(self, data: bytes) -> bytes:
        from jax.experimental import multihost_utils

        def send(array: np.ndarray) -> np.ndarray:
            return np.asarray(multihost_utils.broadcast_one_to_all(array, self.first))

        self.meet()
        length = send(np.frombuffer(len(data).to_bytes(8, "little"), np.uint8))
        size = int.from_bytes(length.astype(np.uint8).tobytes(), "little")
        whole = np.frombuffer(data, np.uint8) if self.first else np.zeros(size, np.uint8)
        return send(whole).astype(np.uint8).tobytes()
