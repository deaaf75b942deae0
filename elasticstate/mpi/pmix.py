"""The part of PMIx (pmix-standard.org, version 4) that starts processes, by Open MPI's library, which mpi4py loads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

_STRING = 3  # PMIX_STRING


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("padding", ctypes.c_byte * 24))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class _App(ctypes.Structure):
    _fields_ = (
        ("cmd", ctypes.c_char_p),
        ("argv", ctypes.POINTER(ctypes.c_char_p)),
        ("env", ctypes.POINTER(ctypes.c_char_p)),
        ("cwd", ctypes.c_char_p),
        ("maxprocs", ctypes.c_int),
        ("info", ctypes.POINTER(_Info)),
        ("ninfo", ctypes.c_size_t),
    )


class Pmix:
    """Client of the PMIx server that has started this process. Raises RuntimeError with PMIx's error number."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libpmix.so.2")
        me = _Proc()
        self._check("PMIx_Init", self._library.PMIx_Init(ctypes.byref(me), None, 0))

    def spawn(self, commands: Sequence[tuple[Sequence[str], str]]) -> None:
        """Start a job of one process for each command: (words, working directory).

        The job continues when it loses processes, and PMIx notifies the other processes of each loss.
        """
        job = _infos([("pmix.pers", "ompi5"), ("pmix.runopt", "notifyerrors,recoverable")])
        made = [_app(*command) for command in commands]  # keeps the objects alive that the copies point to
        apps = (_App * len(made))(*made)
        name = ctypes.create_string_buffer(256)
        self._check("PMIx_Spawn", self._library.PMIx_Spawn(job, len(job), apps, len(apps), name))

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{name} failed: PMIx error {ctypes.c_int(status).value}")


def _app(words: Sequence[str], directory: str) -> _App:
    # No infos: the library treats an empty array as one without an end.
    return _App(words[0].encode(), _strings(words), _strings(()), directory.encode(), 1)


def _infos(pairs: Sequence[tuple[str, str]]) -> ctypes.Array[_Info]:
    infos = (_Info * len(pairs))()
    for info, (key, value) in zip(infos, pairs, strict=True):
        info.key = key.encode()
        info.value.type, info.value.data.string = _STRING, value.encode()
    return infos


def _strings(words: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
