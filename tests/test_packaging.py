"""What is in the wheel, and what installing it brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"
# Target and drafter are made on the spot, so that nothing but the installed packages is used.
GENERATE = """
import sys
sys.path.append(sys.argv[1])
import torch, adaflash_hf
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig
fields = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
target = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=4, **fields)).eval()
drafter = AutoModel.from_config(adaflash_hf.DFlashDrafterConfig(
    num_hidden_layers=1, head_dim=8, block_size=4, mask_token_id=63, target_layer_ids=[1], num_target_layers=4,
    **fields
)).eval()
ids = torch.tensor([[5, 6, 7]])
for policy in ("fixed", "cost_aware"):
    drafted = target.generate(ids, assistant_model=drafter, length_policy=policy, max_new_tokens=6, do_sample=False)
    assert drafted.tolist() == target.generate(ids, max_new_tokens=6, do_sample=False).tolist()
assert "adaflash_hf.generation.decoding" in sys.modules
from adaflash_hf.training import DrafterTrainingArguments
from adaflash_hf.training.lora import add_lora
for call in (lambda: DrafterTrainingArguments(output_dir=sys.argv[1]), lambda: add_lora(drafter)):
    try:
        call()
    except adaflash_hf.MissingDependencyError as error:
        assert "pip install 'adaflash-hf[train]'" in str(error)
    else:
        raise AssertionError("not refused")
assert not {"accelerate", "peft", "datasets"} & set(sys.modules)
"""


def closure(requirements: Iterator[str] | list[str]) -> set[str]:
    """Names of the distributions that installing `requirements` brings, themselves included."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # something optional of another platform
        found.add(name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "adaflash_hf", source / "adaflash_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [path] = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_is_small(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "adaflash_hf").rglob("*.py")}
    data = {str(path.relative_to(ROOT)) for kind in ("*.md", "*.jsonl") for path in (ROOT / "adaflash_hf").rglob(kind)}
    assert data >= {"adaflash_hf/model_cards/drafter.md", "adaflash_hf/evaluation/test_set_prompts.jsonl"}
    assert names >= sources | data | {"adaflash_hf/py.typed"}
    assert not [name for name in names if name.startswith(("tests", "examples", "checkpoints"))]
    assert os.path.getsize(wheel.filename or "") < 1_000_000


def test_metadata(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("METADATA")]
    text = wheel.read(name).decode()
    assert f"Version: {PROJECT['version']}" in text
    assert "License-Expression: Apache-2.0" in text
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in text


def test_installing_brings_nothing_that_transformers_does_not() -> None:
    assert closure(PROJECT["dependencies"]) == closure(["torch", "transformers"])


def test_generate_runs_on_what_is_installed_without_extras(tmp_path: Path) -> None:
    # A directory with links to those distributions alone is an environment without the others.
    for name in closure(PROJECT["dependencies"]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(distribution.locate_file(top))))
    (tmp_path / "adaflash_hf").symlink_to(ROOT / "adaflash_hf")
    run = subprocess.run(
        [sys.executable, "-S", "-c", GENERATE, str(tmp_path)],
        env={**os.environ, "ADAFLASH_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_continuous_checks_run_at_both_ends_of_the_supported_range() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    versions = {entry["transformers"] for entry in workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]}
    [supported] = [Requirement(line) for line in PROJECT["dependencies"] if line.startswith("transformers")]
    [oldest] = [part.version for part in supported.specifier if part.operator == ">="]
    [newest] = [part.version for part in supported.specifier if part.operator == "<"]
    assert {f"=={oldest}.0", f"<{newest}", "constraints.txt"} == versions


def test_hooks_use_the_versions_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pinned = set(re.findall(r"ruff==[\d.]+", hooks))
    assert pinned == set(re.findall(r"^ruff==[\d.]+$", constraints, flags=re.MULTILINE))
