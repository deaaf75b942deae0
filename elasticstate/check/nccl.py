"""Bugs of NCCL that matter when communicators are aborted, shrunk or made anew in a living process.

Only what its makers say, those of torch, or a report with a test program; each entry has its link. That a version is
not named here does not mean that it is free of such bugs.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A bug of the versions from ``first`` on, and before ``fixed`` (None: of all that are known)."""

    first: Version
    fixed: Version | None
    what: str
    source: str
    only_on: str = ""  # a machine, as os.uname() calls it; "": all

    def concerns(self, version: Version, machine: str) -> bool:
        before_fix = self.fixed is None or version < self.fixed
        return self.first <= version and before_fix and self.only_on in ("", machine)


KNOWN = (
    Known(
        (2,),
        (2, 19, 1),
        "an abort from another thread may hang; fixed in 2.19.1",
        "https://github.com/NVIDIA/nccl/issues/992",
    ),
    Known(
        (2,),
        (2, 22),
        "several communicators cannot be aborted together, and one after the other may hang",
        "https://github.com/pytorch/pytorch/pull/150690",
    ),
    Known(
        (2, 25),
        (2, 26, 2),
        "ncclCommAbort hangs; fixed in 2.26.2",
        "https://github.com/pytorch/pytorch/issues/149153",
    ),
    Known(
        (2, 26),
        (2, 27),
        "non-blocking communicators hang now and then: TORCH_NCCL_USE_COMM_NONBLOCKING=0; nobody says whether 2.27 is "
        "free of that",
        "https://github.com/pytorch/pytorch/pull/154055",
    ),
    Known(
        (2,),
        (2, 29, 3),
        "collectives may hang for good on ARM; fixed in 2.29.3",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1",
        only_on="aarch64",
    ),
    Known(
        (2, 27),
        (2, 31),
        "over InfiniBand, collectives may fail after ncclCommShrink; said to be fixed in 2.31",
        "https://github.com/NVIDIA/nccl/issues/2397",
    ),
    Known(
        (2, 29, 7),
        (2, 30, 7),
        "some hang on several hosts with InfiniBand: NCCL_PXN_DISABLE=1; fixed in 2.30.7",
        "https://docs.nvidia.com/cuda/cuest/troubleshooting/index.html",
    ),
    Known(
        (2, 31, 2),
        None,
        "ncclCommDestroy of what was shrunk with NCCL_SHRINK_ABORT hangs: it is to be aborted",
        "https://github.com/pytorch/pytorch/pull/194775",
    ),
)


def known_of(version: Version, machine: str) -> list[str]:
    """In words, with the source; the most recent last."""
    return [f"{known.what} ({known.source})" for known in KNOWN if known.concerns(version, machine)]
