"""What importing the package imports, and what it registers without importing it. Each in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import adaflash_hf
import adaflash_hf.generation
import adaflash_hf.training


HEAVY = {"torch", "transformers", "accelerate", "peft", "rich", "datasets", "safetensors", "huggingface_hub"}
IMPORT = """
import json, sys
import torch, transformers
before = set(sys.modules)
import adaflash_hf
report = {"imported": sorted(set(sys.modules) - before)}
from transformers import AutoConfig, AutoModel
config = AutoConfig.for_model(
    "dflash_drafter", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, block_size=4, mask_token_id=63, target_layer_ids=[1], num_target_layers=4,
)
report["config"] = [type(config).__module__, type(config) in AutoModel._model_mapping]
model = AutoModel.from_config(config)
report["model"] = type(model).__module__
report["registered"] = AutoModel._model_mapping[type(config)] is type(model)
from transformers.generation import GenerationMixin
report["routed"] = hasattr(GenerationMixin.generate, "__wrapped__")
report["active"] = adaflash_hf.is_routing_active()
adaflash_hf.uninstall_routing()
report["active_after"] = adaflash_hf.is_routing_active()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_importing_the_package_imports_nothing_that_takes_time(report: dict[str, Any]) -> None:
    assert set(report["imported"]) == {
        "adaflash_hf",
        "adaflash_hf.auto_registration",
        "adaflash_hf.errors",
        "adaflash_hf.generation",
        "adaflash_hf.generation.routing",
        "adaflash_hf.lazy_imports",
    }


def test_auto_classes_know_the_drafter_before_it_is_imported(report: dict[str, Any]) -> None:
    assert report["config"] == ["adaflash_hf.configuration_dflash_drafter", True]
    assert report["model"] == "adaflash_hf.modeling_dflash_drafter"
    assert report["registered"]


def test_generate_is_routed_when_it_is_imported(report: dict[str, Any]) -> None:
    assert report["routed"]
    assert report["active"]
    assert not report["active_after"]


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, adaflash_hf.cli as cli; cli.main(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in run.stderr.split()}
    assert "typer" in imported
    assert not imported & (HEAVY - {"rich"})  # typer formats with rich


def test_reading_prompts_does_not_import_what_trains() -> None:
    code = "import sys, adaflash_hf.training.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("package", [adaflash_hf, adaflash_hf.generation, adaflash_hf.training])
def test_type_checkers_and_python_see_the_same_names(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            module = sys.modules[getattr(package, alias.name).__module__].__name__
            assert module.startswith(f"{package.__name__}.{statement.module}"), alias.name
    listed = dir(package)
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert name in listed
        assert getattr(package, name) is not None


def test_unknown_names_are_refused_as_ever() -> None:
    with pytest.raises(AttributeError, match="module 'adaflash_hf' has no attribute 'Drafter'"):
        adaflash_hf.Drafter  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Drafter'"):
        exec("from adaflash_hf import Drafter")
