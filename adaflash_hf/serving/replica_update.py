"""Gives one running server another version of its drafter, and makes sure that this, and nothing else, happened.

Before and after, the target's checksums must be the same; every tensor of the drafter that is new must have a new
checksum; and on the same prompts about as many drafts must be accepted. Otherwise the tensors from before are put
back, and the same is checked of that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import PublishedVersionError, ServerError
from .acceptance_probe import ProbeResult, ServerProbe
from .draft_payload import DraftWeights, check_same_drafter, payloads, stale_tensors
from .replica import Replica, ServedModel
from .served_versions import weight_label


__all__ = ["ReplicaUpdate", "TargetChangedError", "UnfinishedUpdateError", "UpdateReport"]

logger = logging.getLogger(__name__)


class TargetChangedError(ServerError):
    """A server's target is no longer what it was. Its answers are not to be trusted until it has been started anew."""


class UnfinishedUpdateError(ServerError):
    """An update failed, and going back did too: nobody knows which tensors a server has."""


@dataclass(frozen=True)
class UpdateReport:
    """
    An update that stayed.

    Attributes:
        before: How drafting fared before.
        after: How it fares now.
        pause_s: Seconds for which requests waited.
        is_cache_flushed: Whether cached prefixes were forgotten; else their drafts are a little worse for a while.
    """

    before: ProbeResult
    after: ProbeResult
    pause_s: float
    is_cache_flushed: bool


class ReplicaUpdate:
    """
    One update of one server.

    Args:
        replica (`Replica`): The server.
        served (`ServedModel`): What it says it serves.
        current (`DraftWeights`): The drafter it has, to go back to.
        probe (`ServerProbe`): What to try drafters on.
        min_relative_acceptance (`float`): Share of the accepted drafts that a new version must reach; 0 takes any.
        bucket_bytes (`int`): About how large one request may be.
    """

    def __init__(
        self,
        replica: Replica,
        served: ServedModel,
        current: DraftWeights,
        probe: ServerProbe,
        *,
        min_relative_acceptance: float = 0.5,
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        self._replica, self._served, self._current, self._probe = replica, served, current, probe
        self._min_relative_acceptance, self._bucket_bytes = min_relative_acceptance, bucket_bytes
        self._pause_s = 0.0

    def run(self, new: DraftWeights, version: int) -> UpdateReport:
        """
        Give the server a version, or leave it as it was.

        Args:
            new (`DraftWeights`): The version's weights.
            version (`int`): Its number.

        Raises:
            PublishedVersionError: The version is not fit to be served; the one before is served again.
            TargetChangedError: The target is not what it was.
            UnfinishedUpdateError: The server was lost on the way; see [`put_back`].
            ServerError: The server does not do what it should; the version may be tried again.
        """
        check_same_drafter(new, self._current)
        replica = self._replica
        target, draft = replica.checksums("target"), replica.checksums("draft")
        prompts = self._probe.prompts() if self._min_relative_acceptance > 0 else []
        before = self._probe.measure(replica, self._served, prompts)
        try:
            self._write(new, weight_label(version))
            self._check_target(target)
            self._check_draft(new, draft)
            is_flushed = replica.flush_cache()
            after = self._probe.measure(replica, self._served, prompts)
            if after.has_collapsed(before, self._min_relative_acceptance):
                raise PublishedVersionError(
                    f"Version {version} accepts {after.accepted} drafts in {after.rounds} rounds on {replica.url}, "
                    f"the one before {before.accepted} in {before.rounds}; it must reach "
                    f"{self._min_relative_acceptance:.0%}. {_why_collapsed(self._served)}"
                )
        except (PublishedVersionError, ServerError) as error:
            self._roll_back(target, draft, error)
            raise
        return UpdateReport(before, after, self._pause_s, is_flushed)

    def put_back(self, label: str) -> None:
        """
        Write the drafter from before over whatever an update that was cut off has left.

        Args:
            label (`str`): What the server called its weights before that update.
        """
        self._write(self._current, label)
        self._replica.flush_cache()

    def _write(self, weights: DraftWeights, label: str) -> None:
        began_s = time.perf_counter()
        # The label goes with the last bucket, so that a server that has it has all tensors.
        waiting: str | None = None
        with self._replica.paused():
            paused_s = time.perf_counter()
            with self._replica.draft_update():
                for payload in payloads(weights, self._bucket_bytes):
                    if waiting is not None:
                        self._replica.update_draft(waiting, self._served.tp_size, None)
                    waiting = payload
                assert waiting is not None
                self._replica.update_draft(waiting, self._served.tp_size, label)
        self._pause_s = time.perf_counter() - paused_s
        logger.debug("%s took %.3f s in all", label, time.perf_counter() - began_s)

    def _check_target(self, expected: Mapping[str, str]) -> None:
        changed = _different(expected, self._replica.checksums("target"))
        if changed:
            raise TargetChangedError(
                f"{self._replica.url}: the update of the drafter changed {len(changed)} tensors of the target, such "
                f"as `{changed[0]}`. Its answers are not the target's any more: stop it, do not use this version "
                "of SGLang for updates, and start server and reload client anew."
            )

    def _check_draft(self, new: DraftWeights, before: Mapping[str, str]) -> None:
        after = self._replica.checksums("draft")
        stale = stale_tensors(new, self._current, before, after)
        if stale:
            raise ServerError(
                f"{self._replica.url} reported success and left {len(stale)} tensors of the drafter as they were, "
                f"such as `{stale[0]}`. It runs another drafter than {new.source} is a version of."
            )

    def _roll_back(self, target: Mapping[str, str], draft: Mapping[str, str], reason: Exception) -> None:
        replica = self._replica
        logger.warning("%s: going back to the drafter from before: %s", replica.url, reason)
        try:
            self.put_back(self._served.weight_version)
            wrong = _different(draft, replica.checksums("draft"))
            changed = _different(target, replica.checksums("target"))
        except ServerError as error:
            raise UnfinishedUpdateError(f"{reason} Going back failed as well: {error}") from reason
        if changed and not isinstance(reason, TargetChangedError):
            raise TargetChangedError(
                f"{replica.url}: going back changed {len(changed)} tensors of the target; start it and the "
                "reload client anew."
            ) from reason
        if wrong:
            raise ServerError(
                f"{reason} Going back to {self._current.source} left {len(wrong)} tensors of the drafter different "
                f"from before, such as `{wrong[0]}`: it was another drafter. Drafts may be poor until a version is "
                "taken."
            ) from reason


def _different(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _why_collapsed(served: ServedModel) -> str:
    if served.algorithm == "DFLASH" and served.device != "cpu":
        return (
            "SGLang's own DFLASH keeps copies of the drafter's key and value weights that an update does not reach; "
            "serve with this package's plugin (`adaflash export --to sglang-plugin`), which renews them."
        )
    return "Its weights are broken or made for another target."
