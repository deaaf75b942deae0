"""Script of workers in test_template_process.py: does what the file ``case`` there says, and prints what it sees."""

import atexit
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import threading
import time


def text(path):
    with open(path) as file:
        return file.read()


def kind(fd):
    mode = os.fstat(fd).st_mode
    return stat.filemode(mode)[0]


def stream(file):
    return [
        file.name,
        file.mode,
        file.encoding,
        file.errors,
        file.line_buffering,
        file.write_through,
        file.seekable(),
        file.isatty(),
        file.closed,
    ]


def look():
    """Print everything that a script can see of how it was started."""
    main = sys.modules["__main__"]
    status = dict(line.split(":\t", 1) for line in text("/proc/self/status").splitlines() if ":\t" in line)
    deaths = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(deaths), 0, 0, 0)  # PR_GET_PDEATHSIG
    reaps = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(reaps), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    seen = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [
            main.__name__,
            getattr(main, "__file__", 0),
            main.__package__,
            main.__doc__,
            type(main.__loader__).__name__,
        ],
        "spec": str(getattr(main.__spec__, "name", main.__spec__)),
        "names": sorted(n for n in vars(main) if n.startswith("__")),
        "is_main": vars(main) is globals(),
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr), stream(sys.__stdout__)],
        "descriptors": sorted(
            (int(fd), kind(int(fd))) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        ),
        "directory": os.getcwd(),
        "umask": os.umask(0o22),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        # glibc catches two signals of its own (32, 33) in a process that has had threads, as each one with torch has.
        "signals": [int(status[name], 16) & ~(3 << 31) for name in ("SigBlk", "SigIgn", "SigCgt")],
        "death": [deaths.value, reaps.value],
        "limits": [resource.getrlimit(limit) for limit in range(16)],
        "title": text("/proc/self/cmdline").rstrip("\0").split("\0"),
        "name": text("/proc/self/comm"),
        "flags": str(sys.flags),
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k not in ("ELASTICSTATE_AGENT", "ELASTICSTATE_SOCKET")
        },
        "threads": [t.name for t in threading.enumerate()],
        "excepthook": sys.excepthook is sys.__excepthook__,
        "warnings": str(sys.warnoptions),
        "executable": sys.executable,
        "nice": os.nice(0),
        "tracing": str(sys.gettrace()),
    }
    print(json.dumps(seen))


def random_numbers():
    import multiprocessing
    import random

    import numpy
    import torch

    print(
        json.dumps(
            [
                random.random(),
                numpy.random.random(),
                multiprocessing.current_process().authkey.hex(),
                torch.initial_seed(),
            ]
        )
    )


def square(number):
    return number * number, os.getpid()


def processes():
    """Print the results of process pools of each kind, and of a DataLoader with workers."""
    import multiprocessing

    import torch

    found = {}
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found[method] = [value for value, pid in pool.map(square, range(4)) if pid != os.getpid()]
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2, num_workers=2)
    found["loader"] = [batch.tolist() for batch in loader]
    found["matmul"] = float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())
    torch.set_num_threads(2)
    found["threads"] = float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())
    print(json.dumps(found))


LAST = ("type", "value", "exc")


def leave(how):
    atexit.register(
        lambda: print("exit function", "__main__" in sys.modules and sys.modules["__main__"].__dict__ is globals())
    )
    atexit.register(lambda: print("last error", [repr(getattr(sys, f"last_{name}", None)) for name in LAST]))
    thread = threading.Thread(target=lambda: (time.sleep(0.2), print("thread")))
    thread.start()
    if how == "text":
        sys.exit("a reason")
    if how == "code":
        sys.exit(7)
    if how == "error":
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("bad") from error
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "signal":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    if how == "exec":
        compile("a b", "<text>", "exec")
    if how == "library":  # whose exit function writes a line
        ctypes.CDLL(os.path.abspath("exit.so"))
    if how == "stdio":
        ctypes.CDLL(None).printf(b"in the buffer of C\n")
    if how == "object":
        globals()["last"] = Last()


class Last:
    def __del__(self):
        print("deleted", self is not None)


def libraries():
    """Train a step, and print the libraries that keep the exit functions of C++ alive."""
    import torch

    from elasticstate.worker import script

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.distributed.destroy_process_group()
    print(json.dumps(sorted(script.mapped_libraries() - script._harmless_libraries)))


if __name__ == "__main__":
    name, *arguments = text("case").split()
    {
        "look": look,
        "random": random_numbers,
        "processes": processes,
        "leave": leave,
        "libraries": libraries,
        "sleep": lambda: time.sleep(100),
        "quick": lambda: sys.exit(7),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }[name](*arguments)
