"""What plugins add, by name: models, data, optimizers, losses, learning-rate and pipeline schedules. No torch.

Ground floor. A plugin is a module that calls the functions below when it is imported. A builder is a function, or
`"package.module:function"`, which is imported when it is needed: for pipeline schedules where a run is checked, for
all else in the workers only. Names are chosen in a config (`model.name=mine`), and the fields of the `config`
dataclass are keys under them (`model.mine.width=64`), typed and checked as all others are. docs/plugins.md has the
whole protocol.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

from hp_train.errors import ConfigError

Builder = str | Callable[..., Any]

NAME_KEYS = {
    "model": "model.name", "data": "data.name", "optimizer": "optimizer.name", "loss": "trainer.loss",
    "lr_scheduler": "lr_scheduler.name", "pp_schedule": "pp.schedule",
}  # fmt: skip
"""Kind -> the key that chooses among its names. The settings of a name are below that key's group."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that can be chosen by name."""

    kind: str
    name: str
    config: type | None  # dataclass of its own settings
    build: Builder
    shapes: Builder | None = None  # of a model
    describe: Builder | None = None  # of a data source
    state_bytes: int = 0  # of an optimizer, per parameter
    stages_per_rank: int = 1  # of a pipeline schedule, for pp.stages_per_rank=null
    summary: str = ""  # of a pipeline schedule, for its line in `hp-train schedule list`

    @property
    def section(self) -> str | None:
        """Return the key below which its settings are; None without any."""
        return None if self.config is None else f"{NAME_KEYS[self.kind].partition('.')[0]}.{self.name}"


_components: dict[tuple[str, str], Component] = {}


def register_model(name: str, *, config: type | None = None, build: Builder, shapes: Builder) -> None:
    """Add a model. `build` makes a pipeline stage of it, `shapes` tells its parameters without torch."""
    _add(Component("model", name, config, build, shapes=shapes))


def register_data(name: str, *, config: type | None = None, build: Builder, describe: Builder | None = None) -> None:
    """Add a data source. `build` opens a split of it, `describe` tells its size before anything starts."""
    _add(Component("data", name, config, build, describe=describe))


def register_optimizer(name: str, *, config: type | None = None, build: Builder, state_bytes: int) -> None:
    """Add an optimizer, whose state takes `state_bytes` per parameter in a checkpoint."""
    _add(Component("optimizer", name, config, build, state_bytes=state_bytes))


def register_loss(name: str, *, config: type | None = None, build: Builder) -> None:
    """Add a loss: `build` makes the module that takes the place of the output matrix's cross-entropy."""
    _add(Component("loss", name, config, build))


def register_lr_schedule(name: str, *, config: type | None = None, build: Builder) -> None:
    """Add a shape of the learning rate after the warm-up."""
    _add(Component("lr_scheduler", name, config, build))


def register_pp_schedule(
    name: str, *, config: type | None = None, build: Builder, stages_per_rank: int = 1, summary: str = ""
) -> None:
    """Add a pipeline schedule. `build` makes the orders of all ranks, without torch; they are proven before a run."""
    if type(stages_per_rank) is not int or stages_per_rank < 1:
        told = f"stages_per_rank={stages_per_rank!r} must be an integer of at least 1"
        raise ConfigError(f"plugin: pp_schedule {name!r}: {told}")
    _add(Component("pp_schedule", name, config, build, stages_per_rank=stages_per_rank, summary=summary))


def components(kind: str | None = None) -> list[Component]:
    """Return what plugins have added, of one kind or all."""
    return [component for component in _components.values() if kind in (None, component.kind)]


def find(kind: str, name: str) -> Component | None:
    """Return what a plugin has added under a name; None for what is built in, and for what is no name at all."""
    return _components.get((kind, name)) if isinstance(name, str) else None


def settings_of(component: Component, config: Any) -> Any:
    """Return the component's own settings out of a whole config; None if it has none."""
    if component.section is None:
        return None
    group, _, name = component.section.partition(".")
    return getattr(getattr(config, group), name)


def resolve(builder: Builder) -> Callable[..., Any]:
    """Return the function that a builder names, imported now."""
    if not isinstance(builder, str):
        return builder
    module, _, attribute = builder.partition(":")
    return getattr(importlib.import_module(module), attribute)


def forget() -> None:
    """Take everything out again, for tests."""
    _components.clear()


def _add(component: Component) -> None:
    what = f"plugin: {component.kind} {component.name!r}"
    if not _NAME.fullmatch(component.name):
        raise ConfigError(f"{what}: a name is of lower-case letters, digits and _")
    if component.config is not None and not is_dataclass(component.config):
        raise ConfigError(f"{what}: config={component.config!r} is not a dataclass")
    for builder in (component.build, component.shapes, component.describe):
        if isinstance(builder, str) and not re.fullmatch(r"[\w.]+:\w+", builder):
            raise ConfigError(f"{what}: {builder!r} is not `package.module:function`")
    known = _components.get((component.kind, component.name))
    if known is not None and known != component:
        raise ConfigError(f"{what} is registered twice")
    _components[component.kind, component.name] = component
