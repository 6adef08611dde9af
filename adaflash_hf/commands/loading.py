"""Finds and loads the two models of a command, telling the user what takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..embedded_target import EMBEDDED_TARGET_NAME, ProgressCallback, load_target, loading_target
from ..errors import InvalidInputError
from ..generation.prepacking import has_prepacked_layers, settle_prepacking, unpacked_twin
from ..hub_connection import hub_or_cache, loading_checkpoint, refuse_missing_directory


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..configuration_dflash_drafter import DFlashDrafterConfig
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..serving.formats import TargetFiles
    from ..training.trajectory_dataset import TrajectoryDataset


__all__ = [
    "LoadedModels",
    "check_checkpoint",
    "check_fits",
    "check_target",
    "check_trajectories",
    "find_baseline",
    "find_drafter",
    "load_beside",
    "load_drafter",
    "load_models",
    "tell_other_makers",
]

_DRAFTER_OF_EMBEDDED_TARGET = "adaflash-drafter-smollm2-135m"
_CHECKPOINTS_DIRECTORY = Path(__file__).resolve().parents[2] / "checkpoints"


class LoadedModels(NamedTuple):
    """Everything a command needs to generate."""

    target_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DFlashDrafterModel


def find_drafter(target: str, drafter: str | None) -> str:
    """
    The drafter to load: the given one, or the one that a source checkout holds for the default target.

    Args:
        target (`str`):
            Value of `--target`.
        drafter (`str`, *optional*):
            Value of `--drafter`.
    """
    if drafter is not None:
        refuse_missing_directory(drafter, "--drafter")
        return drafter
    if target != EMBEDDED_TARGET_NAME:
        raise InvalidInputError(
            f"`--target` is {target!r} and no drafter was given; pass --drafter with a Hub id or directory trained "
            "for that target."
        )
    directory = _CHECKPOINTS_DIRECTORY / _DRAFTER_OF_EMBEDDED_TARGET
    if not (directory / "config.json").is_file():
        raise InvalidInputError(
            f"`--drafter` was not given, and the default one is only in a source checkout, at checkpoints/"
            f"{_DRAFTER_OF_EMBEDDED_TARGET}, which is not there; pass --drafter with a Hub id or directory."
        )
    return str(directory)


def check_target(target: str, option: str = "--target") -> None:
    """
    Say that a target is not there before anything is begun that would load it. Only its config.json is read.

    Args:
        target (`str`):
            Hub id or directory.
        option (`str`, *optional*, defaults to `"--target"`):
            What the user named it by.
    """
    if target == EMBEDDED_TARGET_NAME:
        return
    from transformers import AutoConfig

    with loading_target(target, option), hub_or_cache(target):
        AutoConfig.from_pretrained(target, trust_remote_code=False)


def check_checkpoint(
    name_or_path: str,
    option: str = "--drafter",
    model_class: Any = None,
    length_policy: str | None = None,
    target: str | None = None,
) -> Any:
    """
    Refuse what is no drafter or head, or not a whole one, before a target is loaded for it. Of its weights only names
    and shapes are read.

    Args:
        name_or_path (`str`):
            Hub id or directory.
        option (`str`, *optional*, defaults to `"--drafter"`):
            What the user named it by.
        model_class (`type`, *optional*):
            Its class; by default a drafter's.
        length_policy (`str`, *optional*):
            What the drafter must have the head for.
        target (`str`, *optional*):
            What the drafter must fit.

    Returns:
        `PreTrainedConfig`: its configuration.
    """
    from ..adapter_loading import base_of_adapter
    from ..checkpoint_loading import read_checkpoint
    from ..generation.length_policies import check_length_policy
    from ..modeling_dflash_drafter import DFlashDrafterModel

    with loading_checkpoint(name_or_path, option):
        place: str = name_or_path
        arguments: dict[str, Any] = {}
        while (base := base_of_adapter(place, arguments)) is not None:
            place, arguments = base.name_or_path, base.load_arguments({})
        config = read_checkpoint(model_class or DFlashDrafterModel, place, None, arguments).config
    check_length_policy(length_policy, config)
    if target is not None:
        check_fits(config, target)
    return config


def check_fits(config: DFlashDrafterConfig, target: str) -> None:
    """
    Refuse a drafter that does not fit a target, from its config.json. What that leaves open is told after loading.

    Args:
        config (`DFlashDrafterConfig`):
            The drafter's.
        target (`str`):
            Hub id or directory.

    Raises:
        DrafterCompatibilityError: They do not fit.
    """
    if target == EMBEDDED_TARGET_NAME:  # which loads in a second
        return
    from ..serving.target_fit import check_fit

    # What is wrong with the target itself, or not supported, is for those who load it to say.
    with suppress(InvalidInputError, ImportError, RuntimeError, KeyError, AttributeError, TypeError):
        check_fit(config, _files_of(target))


def check_trajectories(dataset: TrajectoryDataset, target: str, features: str) -> None:
    """
    Refuse another target's trajectories, from the config.json of this one. What that leaves open is told after
    loading.

    Args:
        dataset (`TrajectoryDataset`):
            Trajectories to train on.
        target (`str`):
            Hub id or directory.
        features (`str`):
            Value of `--features`.

    Raises:
        InvalidInputError: They do not fit.
    """
    if target == EMBEDDED_TARGET_NAME:  # which loads in a second
        return
    from ..training.trajectory_dataset import check_trajectories_fit

    config = None
    # What is wrong with the target itself is for those who load it to say.
    with suppress(InvalidInputError):
        config = _files_of(target).full_config
    if config is not None:
        check_trajectories_fit(dataset, config, features)


def _files_of(target: str) -> TargetFiles:
    """Where its configuration is: an adapter has its base's."""
    from ..adapter_loading import base_of_adapter
    from ..errors import DrafterCheckpointError
    from ..serving.formats import TargetFiles

    hub: dict[str, Any] = {}
    with suppress(OSError, ValueError, DrafterCheckpointError), hub_or_cache(target):
        if (base := base_of_adapter(target, {})) is not None:
            target, hub = base.name_or_path, base.load_arguments({})
    return TargetFiles(target, hub)


def tell_other_makers(directories: Iterable[Path], target: str, say: Callable[[str], None]) -> None:
    """
    Warn of trajectories that were made by a target of another name. Only told: the same target may be a directory
    here and a name on the Hub there.

    Args:
        directories (`Iterable[Path]`):
            Of trajectories.
        target (`str`):
            Name of the target.
        say (`Callable[[str], None]`):
            Shows the warning.
    """
    from ..training.trajectories import read_settings

    for directory in directories:
        maker = read_settings(directory).get("target")
        if maker and maker != target:
            say(
                f"Warning: {directory} holds responses of {maker!r}, and the target is {target!r}. If these "
                "are not the same model, little of what the drafter learns will be accepted."
            )


def load_drafter(name_or_path: str, target_model: PreTrainedModel, option: str = "--drafter") -> DFlashDrafterModel:
    """
    Load a drafter in its target's dtype and onto its device.

    Args:
        name_or_path (`str`):
            Hub id or directory.
        target_model (`PreTrainedModel`):
            The target it will draft for.
        option (`str`, *optional*, defaults to `"--drafter"`):
            What the user named it by.
    """
    from ..modeling_dflash_drafter import DFlashDrafterModel

    return load_beside(DFlashDrafterModel, name_or_path, target_model, option)


def load_beside(model_class: Any, name_or_path: str, target_model: PreTrainedModel, option: str) -> Any:
    """
    Load a drafter or a head in its target's dtype and onto its device.

    Args:
        model_class (`type`):
            Its class, or `AutoModel`.
        name_or_path (`str`):
            Hub id or directory.
        target_model (`PreTrainedModel`):
            The target it will work with.
        option (`str`):
            What the user named it by.
    """
    with loading_checkpoint(name_or_path, option):
        model = model_class.from_pretrained(name_or_path, dtype=target_model.dtype)
    return model.to(target_model.device).eval()


def load_models(
    target: str,
    drafter: str | None,
    dtype: str,
    device: str | None,
    prepack: bool,
    console: Console,
    length_policy: str | None = None,
) -> LoadedModels:
    """
    Load target, tokenizer and drafter.

    Args:
        target (`str`):
            Value of `--target`.
        drafter (`str`, *optional*):
            Value of `--drafter`.
        dtype (`str`):
            Value of `--dtype`.
        device (`str`, *optional*):
            Value of `--device`.
        prepack (`bool`):
            Value of `--prepack`.
        console (`rich.console.Console`):
            Where progress is shown; not standard output, which belongs to the response.
        length_policy (`str`, *optional*):
            Value of `--length-policy`.
    """
    # Before the target: a wrong drafter should not cost the user the loading time.
    drafter_path = find_drafter(target, drafter)
    with loading_target(target):  # says so where the two are mixed up
        pass
    check_checkpoint(drafter_path, length_policy=length_policy, target=target)
    with _reporting_progress(console, downloads=target != EMBEDDED_TARGET_NAME) as report:
        target_model, tokenizer = load_target(target, dtype, device=device, on_progress=report)
    drafter_model = load_drafter(drafter_path, target_model)
    settle_prepacking(target_model, prepack)
    settle_prepacking(drafter_model, prepack, allow_rounding=True)
    return LoadedModels(target_model, tokenizer, drafter_model)


def find_baseline(target_model: PreTrainedModel, baseline: str, console: Console) -> PreTrainedModel:
    """
    The model that decodes plainly in a comparison; where it is another one than the target, the user is told.

    Args:
        target_model (`PreTrainedModel`):
            From [`load_models`].
        baseline (`str`):
            Value of `--baseline`.
        console (`rich.console.Console`):
            Where the difference is told.
    """
    if baseline != "loaded" or not has_prepacked_layers(target_model):
        return target_model
    console.print(
        "Plain decoding runs on the model as loaded, AdaFlash on rearranged weights too; --baseline prepacked gives "
        "both the same.",
        highlight=False,
        style="dim",
    )
    return unpacked_twin(target_model)


@contextmanager
def _reporting_progress(console: Console, *, downloads: bool) -> Iterator[ProgressCallback]:
    """A spinner, or plain lines where downloads draw bars of their own that a spinner would tear up."""
    if downloads or not console.is_terminal:
        yield lambda message: console.print(f"{message} ...", highlight=False, markup=False)
        return
    with console.status("Loading") as status:
        yield status.update
