"""How a drafter version is written into a server's `weight_version`, and which one served when.

SGLang keeps one string for all of its weights and reports it with every answer that is not streamed. Ours begins with
the name of this package, so that nobody takes it for a version of the target.
"""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Sequence
from typing import Any


__all__ = ["VersionHistory", "reported_spans", "version_of_label", "weight_label"]

_LABEL = re.compile(r"adaflash-(\d+)")


def weight_label(version: int) -> str:
    """What `weight_version` is set to."""
    return f"adaflash-{version}"


def version_of_label(label: object) -> int | None:
    """The drafter version of a `weight_version`, whatever a server has there; None if we did not write it."""
    match = _LABEL.fullmatch(label) if isinstance(label, str) else None
    return None if match is None else int(match[1])


def reported_spans(metadata: dict[str, Any] | None) -> list[tuple[int, int, int]]:
    """
    The spans of an answer as SGLang reports them; empty if it does not.

    Args:
        metadata (`dict`, *optional*):
            `metadata` of a response of the OpenAI interface, or `meta_info` of `/generate`.
    """
    spans = (metadata or {}).get("weight_versions") or []
    return [(version_of_label(span["version"]) or 0, int(span["start"]), int(span["end"])) for span in spans]


class VersionHistory:
    """
    Which version served from when on, as far as it was looked at.

    Args:
        version (`int`, *optional*, defaults to 0): What is assumed before the first look.
    """

    def __init__(self, version: int = 0) -> None:
        self._times: list[float] = []
        self._versions = [version]

    @property
    def current(self) -> int:
        """The newest."""
        return self._versions[-1]

    def saw(self, version: int, at_s: float | None = None) -> None:
        """
        Note a look.

        Args:
            version (`int`): What served.
            at_s (`float`, *optional*): When, on the monotonic clock; now by default.
        """
        if version == self.current:
            return
        # Requests do not last so long that more of them would be asked for.
        self._times, self._versions = self._times[-99:], self._versions[-100:]
        self._times.append(time.monotonic() if at_s is None else at_s)
        self._versions.append(version)

    def spans(self, arrivals: Sequence[tuple[float, int]]) -> list[tuple[int, int, int]]:
        """
        Who drafted which tokens of an answer.

        Args:
            arrivals (`Sequence[tuple[float, int]]`): When tokens had arrived, and how many in all by then.

        Returns:
            `list[tuple[int, int, int]]`: Version and half-open range, without gaps; empty if nothing arrived.
        """
        spans: list[tuple[int, int, int]] = []
        start = 0
        for at_s, count in arrivals:
            version = self._at(at_s)
            if count <= start:
                continue
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], count)
            else:
                spans.append((version, start, count))
            start = count
        return spans

    def _at(self, at_s: float) -> int:
        return self._versions[bisect.bisect_right(self._times, at_s)]
