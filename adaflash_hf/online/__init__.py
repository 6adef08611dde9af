"""Online adaptation: a drafter learns from the traffic it serves and is swapped while it serves.

Inference and training are separate processes. They share a replay buffer (SQLite) and a directory of published
versions, and nothing else.
"""

from .hot_reload import HotReloader, ReloadStatus
from .probe import AcceptanceProbe
from .published_versions import PublishedVersion, PublishedVersions, VersionManifest
from .publisher import Publisher
from .recorded_trajectory import RecordedTrajectory
from .recorder import RecorderCounts, TrajectoryRecorder
from .replay_buffer import BufferSettings, ReplayBuffer, TrainingRound


__all__ = [
    "AcceptanceProbe",
    "BufferSettings",
    "HotReloader",
    "PublishedVersion",
    "PublishedVersions",
    "Publisher",
    "RecordedTrajectory",
    "RecorderCounts",
    "ReloadStatus",
    "ReplayBuffer",
    "TrainingRound",
    "TrajectoryRecorder",
    "VersionManifest",
]
