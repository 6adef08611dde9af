"""The README and the documentation: Python runs, commands are accepted, files and targets exist.

Python blocks run page by page, on tiny models in place of those they name: what is checked is that names, arguments
and results are what the text says. The same code on the real model is the demo's and the examples'.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml
from published_drafters import adapted_drafter
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf import cli, embedded_target
from adaflash_hf.commands import loading
from adaflash_hf.commands.options import DraftProposal, LengthPolicy
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.evaluation.speed import headline_table, headline_text
from adaflash_hf.generation import cost_aware_policy
from adaflash_hf.generation.cost_table import CostTable


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))} | {
    "README.md": README,
    "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
}
# Its scripts are for a machine with SGLang and a GPU; only their `adaflash` commands are checked here.
GPU_PAGE = "serving-on-gpu.md"
VOCABULARY = len(SPECIAL_TOKENS) + 256
# What other lines begin with.
KNOWN_PROGRAMS = {".venv/bin/python", "cd", "git", "make", "pip", "pre-commit", "python"}


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def shell_lines(page: str) -> list[str]:
    """Commands, with continued lines joined and comments and what is piped into them left out."""
    text = "\n".join(blocks("bash", page)).replace("\\\n", " ")
    lines = [line.split("|")[-1].partition(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def adaflash_commands() -> list[list[str]]:
    lines = dict.fromkeys(line for page in PAGES.values() for line in shell_lines(page))
    return [shlex.split(line) for line in lines if line.startswith("adaflash ")]


@pytest.mark.parametrize("command", adaflash_commands(), ids=" ".join)
def test_commands_are_accepted(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    # What follows a double dash belongs to another program.
    own = command[1 : command.index("--")] if "--" in command else command[1:]
    # Files that earlier commands of a page make.
    for word in own:
        if word.startswith("runs/") and not Path(word).suffix:
            (tmp_path / word).mkdir(parents=True, exist_ok=True)
        elif re.fullmatch(r"[\w./-]+\.(jsonl?|ya?ml)", word):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).write_text("{}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # A --help at the end parses everything before it, without running anything.
    assert cli.main([*own, "--help"]) == 0
    assert f"adaflash {command[1]}" in capsys.readouterr().out


def test_there_are_commands_to_check():
    shown = {command[1] for command in adaflash_commands()}
    assert shown >= {
        "bench",
        "card",
        "convert",
        "demo",
        "doctor",
        "export",
        "generate",
        "inspect",
        "online",
        "prompts",
        "serve",
        "train",
        "trajectories",
    }


@pytest.mark.parametrize("name", [name for name in PAGES if name != GPU_PAGE])
def test_other_shell_lines(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in shell_lines(PAGES[name]):
        if line.startswith("adaflash ") or line == "adaflash":
            continue
        words = shlex.split(line)
        assert words[0] in KNOWN_PROGRAMS, line
        if words[0] == "make" and "=" not in words[1]:
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), line
        if (script := next((word for word in words if word.startswith("examples/")), None)) is not None:
            source = (ROOT / script).read_text(encoding="utf-8")
            assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == [], line


def test_the_headline_is_what_was_measured():
    """Its numbers are those of the committed results; `adaflash evaluate speed` prints the lines to put there."""
    for directory in ("results/speed", "results/float32/speed", "results/avx2/speed"):
        result = json.loads((ROOT / directory / "results.json").read_text(encoding="utf-8"))
        assert headline_table(result).splitlines()[-1] in README.splitlines()
        assert headline_text(result) in " ".join(README.split())


@pytest.mark.parametrize("folder", ["results", "checkpoints", "model_cards"])
def test_committed_files_name_no_place(folder):
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".json", ".md"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"/(home|root|tmp|work|Users)/", text), path


def test_make_targets_are_shown():
    assert {"make demo", "make test"} <= set(shell_lines(README))


@pytest.fixture
def tiny_everything(monkeypatch, tmp_path):
    """Models that are loaded by any name are tiny ones, and files land in an empty directory."""
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    target = tiny_target("llama", vocab_size=VOCABULARY)

    def always(result: Any) -> Any:
        return classmethod(lambda cls, *args, **kwargs: result)

    for module in (embedded_target, loading):  # the second has its own name for it, once it is imported
        monkeypatch.setattr(module, "load_target", lambda *a, **k: LoadedTarget(target, tokenizer))
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", always(adapted_drafter(vocab_size=VOCABULARY)))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", always(target))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", always(tokenizer))
    # Measuring the costs of tiny models takes longer than everything that is shown with them.
    rows = np.array([[1.0, 1.2, 1.5], [1.1, 1.4, 1.8], [1.2, 1.6, 2.5]])
    table = CostTable((1, 8, 64), (1, 2, 4), rows, np.array([0.2, 0.3, 0.5]))
    monkeypatch.setattr(cost_aware_policy, "calibrated_table", lambda *args, **kwargs: table)
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks("python", page)])
def test_python_runs(name, tiny_everything, capsys):
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks("python", PAGES[name])):
        exec(compile(block, f"{name}, block {number + 1}", "exec"), namespace)
    assert isinstance(capsys.readouterr().out, str)


def test_every_block_says_what_it_is():
    for name, page in PAGES.items():
        fences = re.findall(r"^```(\w*)$", page, flags=re.MULTILINE)
        assert set(fences[::2]) <= {"python", "bash", "mermaid", "json", "text", "yaml"}, name
        assert set(fences[1::2]) <= {""}, name


def test_pages_are_in_the_navigation_and_link_to_each_other():
    class Loader(yaml.SafeLoader):
        """Leaves the names of Python functions alone."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    for name, page in PAGES.items():
        folder = ROOT if name in ("README.md", "CONTRIBUTING.md") else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
            assert (folder / link).exists(), f"{name}: {link}"


def test_reference_names_exist():
    from importlib import import_module

    for path in (ROOT / "docs" / "reference").glob("*.md"):
        for full_name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            module, _, attribute = full_name.rpartition(".")
            assert getattr(import_module(module), attribute).__doc__, full_name


@pytest.mark.parametrize("choices", [LengthPolicy, DraftProposal])
def test_choices_are_listed(choices):
    for page in (README, PAGES["using_a_drafter.md"]):
        assert all(f'`"{choice.value}"`' in page for choice in choices)
