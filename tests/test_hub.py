"""Loading in other processes: with the package, with the saved sources alone, through a Hub, offline from its cache.

Each step runs in a fresh interpreter, because HF_ENDPOINT is read when huggingface_hub is imported and because a class
registered in this process would hide a fault of the remote code.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, running_hub
from tiny_models import random_block, tiny_drafter

from adaflash_hf import DFlashDrafterModel, LengthHeadModel


REPOSITORY = "org/adaflash-drafter-tiny"
# Makes `import adaflash_hf` fail as if the package were not installed.
BLOCK_PACKAGE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "adaflash_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
LOAD = """
import json, sys, torch
from transformers import AutoConfig, AutoModel
path, out, inputs, trust = sys.argv[1:5]
options = {"trust_remote_code": trust == "trust"}
model = AutoModel.from_pretrained(path, **options)
noise, context = torch.load(inputs)
with torch.no_grad():
    hidden = model(noise, context).last_hidden_state
    ratio = None if model.length_head is None else model.length_head(hidden).ratio.tolist()
config = AutoConfig.from_pretrained(path, **options)
json.dump({
    "model_module": type(model).__module__, "config_module": type(config).__module__, "ratio": ratio,
    "package": "adaflash_hf" in sys.modules, "hidden": hidden.tolist(), "block_size": config.block_size,
}, open(out, "w"))
if len(sys.argv) > 5:
    model.save_pretrained(sys.argv[5])
"""
PUSH = """
import sys
from adaflash_hf import DFlashDrafterModel
DFlashDrafterModel.from_pretrained(sys.argv[1]).push_to_hub(sys.argv[2])
"""


def run_python(code: str, *arguments: Any, folder: Path, environment: dict[str, str] | None = None) -> None:
    """Runs `code` in `folder` with an environment in which no Hub but the given one can be reached."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "PYTEST_"))}
    settings = environment or {"HF_HOME": str(folder / "hf_home"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**inherited, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr


def load_in_subprocess(
    path: Any,
    folder: Path,
    *,
    package: bool,
    trust: bool,
    environment: dict[str, str] | None = None,
    save_to: str = "",
) -> dict[str, Any]:
    """Loads `path` with AutoModel in a fresh interpreter and returns what the model was and what it computed."""
    inputs, out = folder / "inputs.pt", folder / "out.json"
    torch.save(random_block(tiny_drafter().config), inputs)
    code = ("import adaflash_hf\n" if package else BLOCK_PACKAGE) + LOAD
    arguments = [path, out, inputs, "trust" if trust else "distrust", *([save_to] if save_to else [])]
    run_python(code, *arguments, folder=folder, environment=environment)
    return json.loads(out.read_text())


def assert_same_outputs(result: dict[str, Any], drafter: DFlashDrafterModel) -> None:
    with torch.no_grad():
        hidden = drafter(*random_block(drafter.config)).last_hidden_state
        torch.testing.assert_close(torch.tensor(result["hidden"]), hidden)
        if drafter.length_head is not None:
            torch.testing.assert_close(torch.tensor(result["ratio"]), drafter.length_head(hidden).ratio)
    assert result["block_size"] == drafter.config.block_size


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafterModel:
    return tiny_drafter(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        length_head_config={"bottleneck_size": 4},
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty directory to run in, so that nothing is importable by accident."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_the_stand_in_can_be_run_by_hand(tmp_path: Path) -> None:
    with running_hub() as other:
        expected = list(other.environment(tmp_path))
    command = [sys.executable, str(Path(__file__).with_name("hub_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().removeprefix("export ").strip() for _ in expected]
        try:
            variables = dict(line.split("=", 1) for line in lines)
            assert list(variables) == expected
            address = variables["HF_ENDPOINT"] + "/api/repos/create"
            body = json.dumps({"organization": "org", "name": "mine"}).encode()
            with urllib.request.urlopen(address, body, timeout=600) as response:
                assert json.load(response)["url"].endswith("/org/mine")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0


def test_saved_sources_import_only_each_other(drafter: DFlashDrafterModel, tmp_path: Path) -> None:
    drafter.save_pretrained(tmp_path)
    sources = {path.name: ast.parse(path.read_text()) for path in tmp_path.glob("*.py")}
    assert {"modeling_dflash_drafter.py", "configuration_dflash_drafter.py", "modeling_length_head.py"} <= set(sources)
    for name, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in sources, f"{name} imports {node.module}"
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(module.startswith("adaflash_hf") for module in modules), name


@pytest.mark.slow
def test_sources_alone_are_enough(drafter: DFlashDrafterModel, tmp_path: Path, workspace: Path) -> None:
    drafter.save_pretrained(tmp_path / "saved")
    again = workspace / "again"
    result = load_in_subprocess(tmp_path / "saved", workspace, package=False, trust=True, save_to=str(again))
    assert not result["package"]
    assert result["model_module"].startswith("transformers_modules.")
    assert_same_outputs(result, drafter)
    # Saved from the remote code, it is still a complete checkpoint: weights, configuration and sources.
    result = load_in_subprocess(again, workspace, package=False, trust=True)
    assert_same_outputs(result, drafter)
    torch.testing.assert_close(
        DFlashDrafterModel.from_pretrained(again).state_dict(), drafter.state_dict(), rtol=0, atol=0
    )


def test_a_length_head_needs_its_sources_only(drafter: DFlashDrafterModel, tmp_path: Path, workspace: Path) -> None:
    drafter.length_head.save_pretrained(tmp_path / "head")
    code = BLOCK_PACKAGE + (
        "from transformers import AutoModel; import sys, torch\n"
        "head = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "torch.save(head(torch.ones(1, 4, 32)).ratio.detach(), sys.argv[2])\n"
    )
    run_python(code, tmp_path / "head", workspace / "ratio.pt", folder=workspace)
    expected = LengthHeadModel.from_pretrained(tmp_path / "head")(torch.ones(1, 4, 32)).ratio.detach()
    torch.testing.assert_close(torch.load(workspace / "ratio.pt"), expected)


def test_the_installed_package_is_preferred(drafter: DFlashDrafterModel, tmp_path: Path, workspace: Path) -> None:
    drafter.save_pretrained(tmp_path / "saved")
    result = load_in_subprocess(tmp_path / "saved", workspace, package=True, trust=True)
    assert result["model_module"] == "adaflash_hf.modeling_dflash_drafter"
    assert result["config_module"] == "adaflash_hf.configuration_dflash_drafter"
    assert_same_outputs(result, drafter)


def test_remote_code_refuses_damage_too(tmp_path: Path, workspace: Path) -> None:
    damaged = tiny_drafter()
    with torch.no_grad():
        damaged.norm.weight[0] = float("nan")
    damaged.save_pretrained(tmp_path / "saved")
    with pytest.raises(AssertionError, match="DrafterCheckpointError.*`norm.weight` has NaN"):
        load_in_subprocess(tmp_path / "saved", workspace, package=False, trust=True)


@pytest.fixture(scope="module")
def hub_with_drafter(drafter: DFlashDrafterModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("pusher")
    drafter.save_pretrained(folder / "saved")
    with running_hub() as hub:
        environment = hub.environment(folder / "home")
        run_python(PUSH, folder / "saved", REPOSITORY, folder=folder, environment=environment)
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize("package", [True, False])
def test_pushed_pulled_and_used_offline(
    hub_with_drafter: HubServer, drafter: DFlashDrafterModel, package: bool, tmp_path: Path, workspace: Path
) -> None:
    files = hub_with_drafter.repositories[REPOSITORY]
    assert {"config.json", "model.safetensors", "modeling_dflash_drafter.py", "errors.py"} <= set(files)
    environment = hub_with_drafter.environment(tmp_path / "puller")
    options: dict[str, Any] = {"package": package, "trust": not package}
    online = load_in_subprocess(REPOSITORY, workspace, environment=environment, **options)
    assert_same_outputs(online, drafter)
    assert online["model_module"].startswith("adaflash_hf." if package else "transformers_modules.")
    hub_with_drafter.requests_seen.clear()
    offline = load_in_subprocess(REPOSITORY, workspace, environment={**environment, "HF_HUB_OFFLINE": "1"}, **options)
    assert offline == online
    assert hub_with_drafter.requests_seen == []


@pytest.mark.slow
def test_a_repository_of_pickles_is_refused(hub_with_drafter: HubServer, tmp_path: Path, workspace: Path) -> None:
    files = dict(hub_with_drafter.repositories[REPOSITORY])
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub_with_drafter.repositories["org/pickles"] = files
    environment = hub_with_drafter.environment(tmp_path / "home")
    with pytest.raises(AssertionError, match="DrafterCheckpointError: .* has no `model.safetensors`"):
        load_in_subprocess("org/pickles", workspace, package=True, trust=False, environment=environment)
    seen = hub_with_drafter.requests_seen
    assert not [line for line in seen if line.startswith("GET /org/pickles") and line.endswith(".bin")]
