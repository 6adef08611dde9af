from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from adaflash_hf.lazy_imports import LazyClass, lazy_names, when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A package on disk, with a module `colours` that counts how often it runs; its name is this test's own."""
    name = f"lazy_{abs(hash(request.node.nodeid))}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "colours.py").write_text("class Red:\n    shade = 'dark'\n\nBLUE = 3\n")
    (folder / "broken.py").write_text("raise ImportError('on purpose')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


class TestLazyNames:
    def test_imports_on_first_use(self, package: str) -> None:
        module = importlib.import_module(package)
        get, listing = lazy_names(package, {"colours": ["Red", "BLUE"]})
        assert f"{package}.colours" not in sys.modules
        assert {"Red", "BLUE", "colours"} <= set(listing())
        assert get("BLUE") == 3
        assert module.BLUE == 3  # kept, so that `__getattr__` is asked once
        assert get("Red") is sys.modules[f"{package}.colours"].Red
        assert get("colours") is sys.modules[f"{package}.colours"]

    def test_unknown_name(self, package: str) -> None:
        importlib.import_module(package)
        get, _ = lazy_names(package, {"colours": ["Red"]})
        with pytest.raises(AttributeError, match="has no attribute 'GREEN'"):
            get("GREEN")


class TestWhenImported:
    def test_now_if_it_is_imported(self, package: str) -> None:
        module = importlib.import_module(f"{package}.colours")
        seen: list[ModuleType] = []
        when_imported(module.__name__, seen.append)
        assert seen == [module]

    def test_once_with_the_finished_module(self, package: str) -> None:
        seen: list[tuple[str, int]] = []
        for label in ("first", "second"):
            when_imported(f"{package}.colours", lambda module, label=label: seen.append((label, module.BLUE)))
        importlib.import_module(package)
        assert seen == []
        importlib.import_module(f"{package}.colours")
        importlib.import_module(f"{package}.colours")
        assert seen == [("first", 3), ("second", 3)]

    def test_module_looks_as_ever(self, package: str) -> None:
        when_imported(f"{package}.colours", lambda module: None)
        module = importlib.import_module(f"{package}.colours")
        assert module.__spec__ is not None
        assert module.__spec__.origin == module.__file__
        assert module.__spec__.loader.get_source(module.__name__).startswith("class Red")

    def test_failed_imports_stay_failed(self, package: str) -> None:
        seen: list[ModuleType] = []
        when_imported(f"{package}.broken", seen.append)
        with pytest.raises(ImportError, match="on purpose"):
            importlib.import_module(f"{package}.broken")
        assert seen == []

    def test_absent_module(self, package: str) -> None:
        when_imported(f"{package}.nothing", lambda module: None)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{package}.nothing")


class TestLazyClass:
    class Config:
        pass

    def test_is_the_class_when_looked_at(self, package: str) -> None:
        lazy = LazyClass(f"{package}.colours", "Red", self.Config)
        assert lazy.config_class is self.Config
        assert lazy.__name__ == "Red"
        assert "not imported yet" in repr(lazy)
        assert f"{package}.colours" not in sys.modules
        assert lazy.shade == "dark"
        red = sys.modules[f"{package}.colours"].Red
        assert isinstance(lazy(), red)
        assert isinstance(red(), lazy)
        assert issubclass(red, lazy)
        assert not isinstance(3, lazy)

    def test_pickles_without_importing(self, package: str) -> None:
        lazy = pickle.loads(pickle.dumps(LazyClass(f"{package}.colours", "Red", dict)))
        assert (lazy.__module__, lazy.__name__, lazy.config_class) == (f"{package}.colours", "Red", dict)
        assert f"{package}.colours" not in sys.modules
