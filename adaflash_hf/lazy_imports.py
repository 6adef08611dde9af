"""Puts imports off until they are needed, so that importing the package is quick.

transformers imports its own modules when a name is first asked for, and most of what this package consists of needs
those that take seconds. So names of the package are found on first use, and what has to be done to a module of
transformers is done when somebody imports it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


__all__ = ["LazyClass", "lazy_names", "when_imported"]


def lazy_names(
    package: str, names_by_module: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """
    `__getattr__` and `__dir__` of a package whose names are imported on first use (PEP 562).

    Args:
        package (`str`):
            `__name__` of the package.
        names_by_module (`Mapping[str, Iterable[str]]`):
            Modules, relative to the package, and the names each of them gives.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        elif name in names_by_module:
            return importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # found at once from now on
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *names_by_module})

    return get, listing


def when_imported(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """
    Do something to a module as soon as it is imported: now, if it has been.

    Args:
        module_name (`str`):
            Full name of the module.
        action (`Callable[[ModuleType], None]`):
            Called once with the module, after its code has run and before the import returns.
    """
    module = sys.modules.get(module_name)
    # A module that is being imported right now is in `sys.modules` too, unfinished.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    _finder.actions.setdefault(module_name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _ImportWatcher(MetaPathFinder):
    """Finds nothing itself: has the other finders find, and adds the actions to what runs the module's code."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._add_actions(spec.loader)
                return spec
        return None

    def _add_actions(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for action in self.actions.pop(module.__name__, []):
                action(module)

        # Set on the loader, which thereby stays what it is for everybody who looks at it. Most load one module each.
        loader.exec_module = execute_and_act  # type: ignore[method-assign]


_finder = _ImportWatcher()


class LazyClass:
    """
    Stands for a class until its module is imported, which the first look at it does.

    Args:
        module_name (`str`):
            Full name of the module.
        name (`str`):
            Name of the class.
        config_class (`type`):
            The class attribute of that name, which transformers reads when it registers a model.
    """

    def __init__(self, module_name: str, name: str, config_class: type) -> None:
        self.__module__ = module_name
        self.__name__ = self.__qualname__ = name
        self.config_class = config_class

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._load())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._load())

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyClass, (self.__module__, self.__name__, self.config_class)

    def __repr__(self) -> str:
        return f"<class {self.__module__}.{self.__name__}, not imported yet>"
