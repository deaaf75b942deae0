"""Bugs of NCCL that matter when communicators are aborted, shrunk or created again in a living process.

Sources are NVIDIA, PyTorch, or a report with a test program; each entry has its link. A version that is not listed here
may have such bugs, too.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KnownBug:
    """A bug of the versions from ``first`` on and before ``fixed`` (None: not fixed in any known version)."""

    first: Version
    fixed: Version | None
    bug: str
    source: str
    only_on: str = ""  # machine type as in os.uname(); "": all
    is_refused: bool = False  # no worker starts with such a version, unless the user permits it

    def concerns(self, version: Version, machine: str) -> bool:
        """Return True if this version has the bug on this machine."""
        before_fix = self.fixed is None or version < self.fixed
        return self.first <= version and before_fix and self.only_on in ("", machine)


KNOWN_BUGS = (
    KnownBug(
        (2,),
        (2, 26, 2),
        "a process may not survive the abort of its communicators: NVIDIA's own in-process restart needs 2.26.2",
        "https://nvidia.github.io/nvidia-resiliency-ext/inprocess/usage_guide.html",
        is_refused=True,
    ),
    KnownBug(
        (2,),
        (2, 19, 1),
        "an abort from another thread may hang; fixed in 2.19.1",
        "https://github.com/NVIDIA/nccl/issues/992",
    ),
    KnownBug(
        (2,),
        (2, 22),
        "several communicators cannot be aborted together, and aborting one after the other may hang",
        "https://github.com/pytorch/pytorch/pull/150690",
    ),
    KnownBug(
        (2, 25),
        (2, 26, 2),
        "ncclCommAbort hangs; fixed in 2.26.2",
        "https://github.com/pytorch/pytorch/issues/149153",
    ),
    KnownBug(
        (2,),
        (2, 29, 3),
        "collectives may hang forever on ARM; fixed in 2.29.3",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1",
        only_on="aarch64",
    ),
    KnownBug(
        (2, 27),
        (2, 31),
        "over InfiniBand, collectives may fail after ncclCommShrink; reported as fixed in 2.31",
        "https://github.com/NVIDIA/nccl/issues/2397",
    ),
    KnownBug(
        (2, 28, 3),
        (2, 28, 9),
        "a process that aborts its communicators and goes on may crash (segmentation fault); fixed in 2.28.9",
        "https://nvidia.github.io/nvidia-resiliency-ext/release-notes.html",
        is_refused=True,
    ),
    KnownBug(
        (2, 29, 7),
        (2, 30, 7),
        "some jobs hang on several hosts with InfiniBand: set NCCL_PXN_DISABLE=1; fixed in 2.30.7",
        "https://docs.nvidia.com/cuda/cuest/troubleshooting/index.html",
    ),
    KnownBug(
        (2, 31, 2),
        None,
        "ncclCommDestroy hangs on a communicator that was shrunk with NCCL_SHRINK_ABORT: abort it instead",
        "https://github.com/pytorch/pytorch/pull/194775",
    ),
)


def known_bugs(version: Version, machine: str) -> list[str]:
    """Return the bugs of this version in words, with their sources; the most recent last."""
    return [f"{known.bug} ({known.source})" for known in KNOWN_BUGS if known.concerns(version, machine)]


def refusal(version: Version) -> str:
    """Return the reason why no worker starts with this version, with its source; "" if there is none."""
    reasons = (known for known in KNOWN_BUGS if known.is_refused and known.concerns(version, known.only_on))
    return next((f"{known.bug} ({known.source})" for known in reasons), "")
