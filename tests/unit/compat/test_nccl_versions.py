"""Known bugs of each version of NCCL."""

from __future__ import annotations

import pytest

from elasticstate.compat.nccl_versions import KNOWN_BUGS, known_bugs, refusal


@pytest.mark.parametrize(
    ("version", "machine", "words"),
    [
        ((2, 18, 1), "x86_64", ["in-process restart", "abort from another thread", "aborted together"]),
        ((2, 21, 5), "x86_64", ["in-process restart", "aborted together"]),
        ((2, 23, 4), "x86_64", ["in-process restart"]),
        ((2, 25, 1), "x86_64", ["in-process restart", "ncclCommAbort hangs"]),
        ((2, 26, 1), "x86_64", ["in-process restart", "ncclCommAbort hangs"]),
        ((2, 26, 2), "x86_64", []),
        ((2, 28, 2), "x86_64", ["after ncclCommShrink"]),
        ((2, 28, 3), "x86_64", ["after ncclCommShrink", "may crash"]),
        ((2, 28, 8), "x86_64", ["after ncclCommShrink", "may crash"]),
        ((2, 28, 9), "x86_64", ["after ncclCommShrink"]),
        ((2, 28, 9), "aarch64", ["on ARM", "after ncclCommShrink"]),
        ((2, 29, 3), "aarch64", ["after ncclCommShrink"]),
        ((2, 30, 4), "x86_64", ["after ncclCommShrink", "NCCL_PXN_DISABLE=1"]),
        ((2, 30, 7), "x86_64", ["after ncclCommShrink"]),
        ((2, 31, 2), "x86_64", ["NCCL_SHRINK_ABORT"]),
    ],
)
def test_what_is_known_of_a_version(version: tuple[int, ...], machine: str, words: list[str]) -> None:
    found = known_bugs(version, machine)
    assert len(found) == len(words)
    for known, word in zip(found, words, strict=True):
        assert word in known


def test_every_bug_has_its_source() -> None:
    assert all(known.source.startswith("https://") for known in KNOWN_BUGS)
    assert len({known.source for known in KNOWN_BUGS}) == len(KNOWN_BUGS)


def test_a_refusal_has_its_reason_and_source() -> None:
    assert refusal((2, 28, 5)).endswith(
        "fixed in 2.28.9 (https://nvidia.github.io/nvidia-resiliency-ext/release-notes.html)"
    )
    assert "2.26.2" in refusal((2, 21, 5))
    assert refusal((2, 28, 9)) == refusal((2, 27, 7)) == ""
