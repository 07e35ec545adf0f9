"""From what was typed to a `TrainerConfig`: Hydra composes groups, recipe and overrides over the schema. No torch.

`compose(overrides)` is the function for programs and tests. The command line goes through `run_hydra`, Hydra's own
entry, for --help, --cfg, completion and --multirun. Both check the request first (`override_check`, `yaml_check`), so
that Hydra sees only what it can compose, and both end in `finish`, which gathers every fault that is left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hp_train.config import sources
from hp_train.config.faults import EVERYTHING, Fault
from hp_train.config.key_check import check_value
from hp_train.config.numbers import spell
from hp_train.config.override_check import Request, check_request
from hp_train.config.paths import expand_home
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import (
    GROUPS,
    LEAVES,
    OPTIONAL_SECTIONS,
    SECTIONS,
    Leaf,
    config_class,
    misfit,
    value_at,
)
from hp_train.config.search_path import CONFIGS, SearchPath, name_of, search_path
from hp_train.config.typed_value import Unreadable, is_interpolation, key_of, read_value
from hp_train.config.yaml_text import read as read_yaml
from hp_train.errors import ConfigError

_VERSION_BASE = "1.3"
_PRIMARY = "config"
_QUIET = ("hydra/job_logging=disabled", "hydra/hydra_logging=disabled")  # null is a handler on stdout to Hydra
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed config and everything that is wrong with it, rules over several keys included."""

    config: TrainerConfig
    recipe: str | None
    overrides: tuple[str, ...]  # as typed; composing them again gives the same config
    faults: tuple[Fault, ...] = field(default=())
    notes: tuple[str, ...] = ()  # warnings about the files that it is composed from
    path: SearchPath = field(default_factory=SearchPath)  # where those were looked for

    @property
    def messages(self) -> list[str]:
        """Return one line for each fault."""
        return list(dict.fromkeys(fault.message for fault in self.faults))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the keys whose values are not known after the faults."""
        return tuple(key for fault in self.faults for key in fault.unknown)


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> Composition:
    """Compose `overrides` (`recipe=NAME`, `group=option`, `key=value`) as the command line does.

    Raises ConfigError with every fault, rules over several keys included.
    """
    composition = examine(overrides, config_dir)
    if composition.faults:
        raise ConfigError(*composition.messages)
    return composition


def examine(overrides: Sequence[str], config_dir: str | None = None) -> Composition:
    """As `compose`, but return the faults with what could be composed. Raises ConfigError when nothing could."""
    return compose_request(check_request(overrides, search_path(config_dir)))


def compose_request(request: Request) -> Composition:
    """As `examine`, for a request that has been checked already."""
    _refuse_unreadable(request)
    _prepare(request)
    return finish(_compose_one(request), request)


def _compose_one(request: Request) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base=_VERSION_BASE):
            return hydra_compose(_PRIMARY, request.for_hydra)
    except _HYDRA_ERRORS as error:
        raise ConfigError(*(fault.message for fault in request.all_faults), one_line(error)) from error


def run_hydra(flags: Sequence[str], request: Request, *, strict: bool = False) -> list[Composition]:
    """Run Hydra's command line on a checked request; return what it composed, one for each job of --multirun.

    flags: Hydra's own; with --cfg, --help and the like it prints and composes nothing.
    strict: refuse faults of the request now, rather than with those that the composed config has.
    Raises ConfigError.
    """
    _refuse_unreadable(request)
    if strict and request.all_faults:
        raise ConfigError(*(fault.message for fault in request.all_faults))
    _prepare(request)
    if not any(override.startswith("hydra.") for override in request.for_hydra):
        # what Hydra's entry does for these two, in half the time: it composes first to learn that it is one job
        if not flags:
            return [finish(_compose_one(request), request)]
        if flags == ["--cfg", "job"]:
            print(OmegaConf.to_yaml(_compose_one(request)), end="")
            return []
    composed: list[Composition] = []
    is_multirun = "--multirun" in flags

    def collect(config: DictConfig) -> None:
        hydra = HydraConfig.get()
        composition = finish(config, request)
        if is_multirun:  # in Hydra's grammar; what it quotes means the same to us
            overrides = tuple(map(request.typed_again, OmegaConf.to_container(hydra.overrides.task, resolve=False)))
            recipe = hydra.runtime.choices.get("recipe")
            composition = replace(composition, recipe=recipe and name_of(recipe), overrides=overrides)
        composed.append(composition)

    entry = hydra_main(config_path=str(CONFIGS), config_name=_PRIMARY, version_base=_VERSION_BASE)(collect)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors come to us and not as a block of text to the terminal
    arguments = sys.argv
    with _place_for_the_sweep(flags, request) as place:
        sys.argv = [sys.argv[0], *flags, *place, *_QUIET, *request.for_hydra]
        try:
            entry()
        except _HYDRA_ERRORS as error:
            raise ConfigError(*(fault.message for fault in request.all_faults), one_line(error)) from error
        finally:
            sys.argv = arguments
    return composed


@contextmanager
def _place_for_the_sweep(flags: Sequence[str], request: Request) -> Iterator[list[str]]:
    """Have Hydra's record of a --multirun (multirun.yaml) thrown away, unless hydra.sweep.dir says where it goes.

    Hydra writes it before a job can be refused, and every run has its own overrides.yaml.
    """
    asked = any(override.startswith("hydra.sweep.dir=") for override in request.overrides)
    if "--multirun" not in flags or asked:
        yield []
        return
    with TemporaryDirectory(prefix="hp-train-") as folder:
        yield [f"hydra.sweep.dir='{folder}'"]


def _refuse_unreadable(request: Request) -> None:
    """Stop where the recipe or an option is not known: only what was typed can be judged then."""
    if request.files.readable and not any(EVERYTHING in fault.unknown for fault in request.all_faults):
        return
    tree = _with_arguments(OmegaConf.structured(config_class()), request)
    raise ConfigError(*finish(tree, request, known={argument.key for argument in request.arguments}).messages)


def _prepare(request: Request) -> None:
    ConfigStore.instance().store(name="hp_train_schema", node=config_class())
    sources.activate(request.path, request.files, request.sections_touched, request.mappings_given)


def finish(
    composed: DictConfig, request: Request, *, is_saved: bool = False, known: Collection[str] | None = None
) -> Composition:
    """Resolve and check a composed config.

    is_saved: whether its values are those of a run, with changes.
    known: the keys whose values are to be judged, where files that set others could not be read; all if None.
    """
    from hp_train.config.validate import check_config  # not needed to print a config: --cfg starts faster

    faults = list(request.all_faults)
    tree = composed.copy()
    resolved: dict[str, Any] = {}
    faults.extend(_resolve(tree, resolved))
    config = OmegaConf.to_object(tree)
    assert isinstance(config, TrainerConfig)
    for key, value in resolved.items():
        section, _, name = key.rpartition(".")
        setattr(value_at(config, section), name, value)
    _normalize(config)
    faults.extend(_adopt_pretrained(config, request, is_saved=is_saved))
    unknown = [key for fault in faults for key in fault.unknown]
    if known is not None:
        unknown = [*(key for key in unknown if key != EVERYTHING), *(key for key in LEAVES if key not in known)]
    faults.extend(check_config(config, unknown))
    recipe = None if request.recipe is None else name_of(request.recipe)
    notes = tuple(request.files.notes)
    return Composition(config, recipe, tuple(request.overrides), tuple(faults), notes, request.path)


def change(
    saved: Path, overrides: Sequence[str], recipe: str | None = None, path: SearchPath | None = None
) -> Composition:
    """Apply `key=value` overrides to a config that a run of `recipe` saved, and check it as if it were new.

    Raises ConfigError when the file cannot be used.
    """
    request = check_request(overrides, path or SearchPath())
    request.recipe = recipe
    try:
        written = OmegaConf.create(read_yaml(saved.read_text(encoding="utf-8")))
        _refuse_incomplete(saved, written)
        found = [fault for name, value in OmegaConf.to_container(written).items() for fault in check_value(name, value)]
        if found:
            raise ConfigError(*(f"{saved}: {fault.message}" for fault in found))
        tree = OmegaConf.merge(OmegaConf.structured(config_class()), written)
        tree = _with_arguments(tree, request)
    except (OSError, AttributeError, *_HYDRA_ERRORS) as error:
        raise ConfigError(f"{saved} cannot be used: {one_line(error)}") from error
    return finish(tree, request, is_saved=True)


def _with_arguments(tree: DictConfig, request: Request) -> DictConfig:
    """Return `tree` with the values of the arguments in their places."""
    for section in request.sections_touched:
        if OmegaConf.select(tree, section) is None:
            OmegaConf.update(tree, section, SECTIONS[section]())
    for argument in request.arguments:
        if argument.key in (*LEAVES, *OPTIONAL_SECTIONS) and not argument.is_sweep:
            OmegaConf.update(tree, argument.key, argument.value, merge=argument.adds)
    return tree


def _refuse_incomplete(saved: Path, written: Any) -> None:
    """Stop unless a run's config has every group: what is missing would take the schema's default unnoticed."""
    groups = set(written) if isinstance(written, DictConfig) else set()
    missing = [group for group in GROUPS if group not in groups]
    if missing:
        what = "holds no config" if not groups else f"lacks {', '.join(missing)}"
        raise ConfigError(f"{saved} cannot be used: it {what}; a run writes all of {', '.join(GROUPS)}")


def _resolve(tree: DictConfig, resolved: dict[str, Any]) -> Iterator[Fault]:
    """Put the values of interpolations into `resolved`, key by key, and defaults in their place into `tree`.

    Those that have no value of the right type are faults, and keep the default.
    """
    written = OmegaConf.to_container(tree, resolve=False)
    untyped: DictConfig | None = None  # interpolations in it give values as they are, not bent to the field's type
    for leaf in LEAVES.values():
        value = written
        for name in leaf.key.split("."):
            value = None if value is None else value[name]
        fault = None
        if value == "???":
            fault = Fault(f"{leaf.key} has no value (???); it takes {leaf.expects()}{leaf.choices()}", (leaf.key,))
        elif is_interpolation(value):
            untyped = OmegaConf.create(written) if untyped is None else untyped
            wrong = _resolve_one(untyped, leaf, resolved)
            if wrong is not None:
                fault = Fault(f"{leaf.key}={spell(value)} {wrong}{leaf.choices()}", (leaf.key,))
        if fault is not None or leaf.key in resolved:
            OmegaConf.update(tree, leaf.key, leaf.default)
        if fault is not None:
            yield fault


def _resolve_one(untyped: DictConfig, leaf: Leaf, resolved: dict[str, Any]) -> str | None:
    """Write the value that `leaf` resolves to into `resolved`; return what is wrong with it, if anything."""
    try:
        value = OmegaConf.select(untyped, leaf.key, throw_on_resolution_failure=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if isinstance(value, str) and leaf.kinds != (str,):
            value = _from_text(value, leaf)  # what an environment variable holds is text
    except (OmegaConfBaseException, yaml.YAMLError, RecursionError) as error:
        return f"cannot be resolved: {one_line(error)}"
    fault = misfit(leaf, value)
    if fault is not None:
        return f"resolves to {spell(value)}, which {fault}"
    resolved[leaf.key] = value
    return None


def _from_text(value: str, leaf: Leaf) -> Any:
    try:
        return read_value(leaf.key, value)
    except Unreadable:
        return value


def _normalize(config: TrainerConfig) -> None:
    """Give names their one spelling; unknown ones stay for the rules to refuse."""
    from hp_train.compile.pass_config import normalize_dp_mode, normalize_pp_schedule

    with suppress(ValueError):  # told by the rule for pp.schedule, with the names that are valid
        config.pp.schedule = normalize_pp_schedule(config.pp.schedule)
    with suppress(ValueError):  # told by the bounds of fsdp.dp_mode
        config.fsdp.dp_mode = normalize_dp_mode(config.fsdp.dp_mode)
    expand_home(config)


def _adopt_pretrained(config: TrainerConfig, request: Request, *, is_saved: bool) -> list[Fault]:
    """Give the model the shape of `model.pretrained`. A run's own config has it already: the directory may be gone."""
    typed = set(map(key_of, request.overrides))
    if config.model.pretrained is None or (is_saved and "model.pretrained" not in typed):
        return []
    from hp_train.pretrained.fit import adopt_shape  # only runs that start from weights pay for it

    return adopt_shape(config, typed)


def one_line(error: BaseException) -> str:
    """Return what an error of Hydra, OmegaConf or YAML says, without its layout, links and advice."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.extend(line.strip() for line in str(cause).splitlines())
        cause = cause.__cause__
    skipped = ("See http", "full_key:", "object_type=", "reference_type=", "Search path", "provider=", "To append")
    kept = [text for text in texts if text and not text.startswith(skipped) and set(text) - set("^ ")]
    return "; ".join(dict.fromkeys(kept)) or type(error).__name__
