"""The launch command of an SGLang server for an exported drafter, and what has to be installed to run it.

SGLang is the user's own installation, in whatever Python they name. That Python is asked what it has; nothing of
SGLang is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DrafterCompatibilityError, InvalidInputError, MissingDependencyError
from .engine_outlook import Outlook
from .inspection import Inspection
from .launch_commands import LaunchCommand, sglang_command
from .served_versions import weight_label
from .sglang_plugin.settings import MODE_VARIABLE


__all__ = ["SGLangInstallation", "SGLangOptions", "assumed_sglang", "find_sglang", "plan_launch"]

TESTED_VERSION = "0.5.23"
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_ENTRY = "adaflash"
_VERIFY_MODES = ("static", "cap-accept", "compact")
_PLUGIN_ENVIRONMENT = {
    "verify_mode": MODE_VARIABLE,
    "length_scale": "ADAFLASH_LENGTH_SCALE",
    "min_verify_length": "ADAFLASH_MIN_VERIFY_LENGTH",
    "activation_concurrency": "ADAFLASH_ACTIVATION_CONCURRENCY",
}
# Set by `plan_launch`; a second value would win silently, and the server be waited for in the wrong place.
_OWN_ARGUMENTS = (
    *("--host", "--port", "--model-path", "--model", "--speculative-algorithm", "--speculative-draft-model-path"),
    *("--speculative-num-draft-tokens", "--speculative-dflash-block-size", "--weight-version"),
)
_QUESTION_TIMEOUT_S = 60.0
# Metadata only: importing sglang takes ten seconds and a GPU.
_QUESTION = f"""
import json, os, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
plugins = [entry.name for entry in metadata.entry_points(group={PLUGIN_GROUP!r})]
print(json.dumps({{"sglang": version("sglang"), "adaflash": version("adaflash-hf"), "plugins": plugins}}))
"""


@dataclass(frozen=True)
class SGLangInstallation:
    """
    What a Python has installed.

    Attributes:
        python: The interpreter.
        version: Of SGLang.
        plugins: Names of SGLang plugins.
    """

    python: str
    version: str
    plugins: tuple[str, ...] = ()

    @property
    def program(self) -> list[str]:
        """How its `sglang serve` is called."""
        script = Path(self.python).parent / "sglang"
        # Where scripts are elsewhere, the older spelling, which needs none.
        return [str(script), "serve"] if script.exists() else [self.python, "-m", "sglang.launch_server"]


@dataclass(frozen=True)
class SGLangOptions:
    """
    How to serve.

    Attributes:
        host: Address to listen on.
        port: Port to listen on.
        attention_backend: Of the target; SGLang chooses by default.
        max_running_requests: Most requests at a time; SGLang takes 48 for a server that speculates.
        mem_fraction_static: Share of the GPU's memory for weights and cache.
        tp_size: GPUs that share the target.
        enable_metrics: Whether `/metrics` is there.
        verify_mode: What the plugin does with verify lengths: `"static"` (nothing), `"cap-accept"` (counts, saves
            nothing) or `"compact"` (saves the rows).
        length_scale: The plugin's scale of the length head.
        min_verify_length: The plugin's least rows.
        activation_concurrency: Requests from which on the plugin asks the length head.
        weight_version: Version of the drafter.
        extra: Further arguments, passed on as they are.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    attention_backend: str | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    tp_size: int = 1
    enable_metrics: bool = True
    verify_mode: str | None = None
    length_scale: float | None = None
    min_verify_length: int | None = None
    activation_concurrency: int | None = None
    weight_version: int = 0
    extra: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.verify_mode is not None and self.verify_mode not in _VERIFY_MODES:
            raise InvalidInputError(
                f"`verify_mode` is {self.verify_mode!r}; choose one of {', '.join(_VERIFY_MODES)}."
            )
        given = [argument.partition("=")[0] for argument in self.extra]
        if twice := next((name for name in _OWN_ARGUMENTS if name in given), None):
            raise InvalidInputError(
                f"`{twice}` stands among what is passed on to SGLang, and `adaflash serve sglang` sets it itself, "
                "from the export or from its own options. Leave it out there."
            )

    @property
    def address(self) -> str:
        """Where it answers from this machine."""
        # What listens on all addresses answers on the first of them.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def arguments(self) -> list[str]:
        """As SGLang takes them."""
        given = {
            "--host": self.host,
            "--port": self.port,
            "--attention-backend": self.attention_backend,
            "--max-running-requests": self.max_running_requests,
            "--mem-fraction-static": self.mem_fraction_static,
            "--tp-size": None if self.tp_size == 1 else self.tp_size,
            "--weight-version": weight_label(self.weight_version),
        }
        arguments = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        return [*arguments, *(["--enable-metrics"] if self.enable_metrics else []), *self.extra]

    def environment(self) -> dict[str, str]:
        """As the plugin takes them."""
        return {_PLUGIN_ENVIRONMENT[name]: str(getattr(self, name)) for name in self.plugin_options()}

    def plugin_options(self) -> list[str]:
        """Names of the given ones that only the plugin understands."""
        return [name for name in _PLUGIN_ENVIRONMENT if getattr(self, name) is not None]


def find_sglang(python: str) -> SGLangInstallation:
    """
    Asks a Python for its SGLang.

    Args:
        python (`str`): The interpreter, as `~/sglang/bin/python`.

    Raises:
        InvalidInputError: It is no Python.
        MissingDependencyError: It has no SGLang.
    """
    python = os.path.expanduser(python)
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=_QUESTION_TIMEOUT_S, check=True
        )
        found = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise InvalidInputError(
            f"`python` is {python!r}, which does not run as a Python ({error}); pass the interpreter of the "
            "environment that SGLang is installed in."
        ) from error
    if found["sglang"] is None:
        raise MissingDependencyError(
            f"SGLang is not installed for {python}. It pins its own torch, so give it an environment of its own: "
            f"python3 -m venv sglang-env && sglang-env/bin/pip install sglang=={TESTED_VERSION} adaflash-hf (or the "
            "directory of a clone), and pass --python sglang-env/bin/python."
        )
    return SGLangInstallation(python, found["sglang"], tuple(found["plugins"]))


def assumed_sglang(python: str) -> SGLangInstallation:
    """
    What a Python should have, for a command that is run elsewhere or later.

    Args:
        python (`str`): The interpreter.
    """
    return SGLangInstallation(os.path.expanduser(python), TESTED_VERSION, (PLUGIN_ENTRY,))


def plan_launch(
    inspection: Inspection, target: str | None, installation: SGLangInstallation, options: SGLangOptions
) -> LaunchCommand:
    """
    The command, once all is checked that can be checked beforehand.

    Args:
        inspection (`Inspection`): What `inspect_drafter` says of the export.
        target (`str`, *optional*): Directory or Hub id of the target; by default the one that the drafter names.
        installation (`SGLangInstallation`): Where it is to run.
        options (`SGLangOptions`): How to serve.

    Raises:
        DrafterCompatibilityError: SGLang would refuse the drafter, or run it wrongly.
        InvalidInputError: Nobody names the target, or an option belongs to the plugin and the export does not.
        MissingDependencyError: The export is for the plugin, which is not installed there.
    """
    config = inspection.config
    if config is None or inspection.problems:
        raise DrafterCompatibilityError(
            f"{inspection.source} is no drafter that can be served: {' '.join(inspection.problems)}"
        )
    with_plugin = inspection.format == "sglang-plugin"
    engine = "sglang-plugin" if with_plugin else "sglang"
    outlook = next(entry for entry in inspection.engines if entry.engine == engine)
    if outlook.outlook in (Outlook.REFUSES, Outlook.WRONG):
        raise DrafterCompatibilityError(f"{inspection.source} cannot be served by SGLang as it is. {outlook.reason}")
    target = target or config.target_model_name_or_path
    if target is None:
        raise InvalidInputError(f"{inspection.source} does not name its target; pass it with --target.")
    _check_plugin(with_plugin, installation, options)
    command = sglang_command(config, target, inspection.source, with_plugin=with_plugin)
    notes = [outlook.reason] if outlook.reason else []
    if options.max_running_requests is None:
        notes.append("SGLang runs at most 48 requests at a time when it speculates; see --max-running-requests.")
    if with_plugin and options.verify_mode is None and config.length_head_config is not None:
        notes.append("The length head stays off unless --verify-mode is compact.")
    if installation.version != TESTED_VERSION:
        notes.append(f"SGLang is {installation.version} there; tested is {TESTED_VERSION}.")
    program = installation.program
    return LaunchCommand(
        [*program, *command.arguments[2:], *options.arguments()],
        environment={**command.environment, **options.environment()},
        notes=notes,
    )


def _check_plugin(with_plugin: bool, installation: SGLangInstallation, options: SGLangOptions) -> None:
    if not with_plugin:
        if given := options.plugin_options():
            raise InvalidInputError(
                f"`{given[0]}` is {getattr(options, given[0])!r} and for the plugin, but the export is for SGLang's "
                "own DFLASH, which verifies whole blocks. Leave it out, or export with `adaflash export --to "
                "sglang-plugin`."
            )
        return
    if PLUGIN_ENTRY not in installation.plugins:
        raise MissingDependencyError(
            f"The export is for the plugin, which {installation.python} does not have (SGLang plugins there: "
            f"{', '.join(installation.plugins) or 'none'}). Run: {installation.python} -m pip install adaflash-hf (or "
            "the directory of a clone). Or export with `adaflash export --to sglang`."
        )
    if installation.version != TESTED_VERSION:
        raise MissingDependencyError(
            f"The plugin works with SGLang {TESTED_VERSION} and refuses others; {installation.python} has "
            f"{installation.version}. Run: {installation.python} -m pip install sglang=={TESTED_VERSION}"
        )
