"""Hydra's view of the search path: a config source that reads a person's folders and the packaged recipes.

`recipe=NAME` is the group `recipe` to Hydra, but a plain file in a folder of recipes to a person; this source is the
mapping between the two. Keys that `yaml_check` refused are left out as a file is loaded.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from hp_train.config.schema_tree import GROUPS
from hp_train.config.search_path import RECIPE_GROUP, SearchPath
from hp_train.config.yaml_check import FileCheck
from hp_train.config.yaml_text import read as read_yaml

_SCHEME = "hp-train"
_active: SearchPath = SearchPath()
_unusable: dict[Path, set[str]] = {}
_present: set[str] = set()
_given: set[str] = set()
_bases: dict[Path, dict[str, str]] = {}


def activate(path: SearchPath, files: FileCheck, present: set[str], given: set[str]) -> None:
    """Let Hydra look in `path` from now on.

    files: what was found in them: keys to leave out, and the files that recipes build on.
    present: dotted groups inside a group that are made where an option leaves them null, since keys of them follow.
    given: mappings that the command line gives whole: what any file says of them is left out.
    """
    global _active, _unusable, _present, _given, _bases
    _active, _unusable, _bases, _present, _given = path, files.unusable, files.bases, present, given
    for plugin in (HpTrainConfigSource, HpTrainSearchPath):
        Plugins.instance().register(plugin)


class HpTrainSearchPath(SearchPathPlugin):
    """Puts our source first: it answers for recipes and for options of the groups, and for nothing else."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra when it sets up."""
        search_path.prepend(provider=_SCHEME, path=f"{_SCHEME}://recipes-and-groups")


class HpTrainConfigSource(ConfigSource):
    """Reads `recipe/NAME` and `GROUP/NAME` from the active search path."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix by which Hydra chooses this source."""
        return _SCHEME

    def _file(self, config_path: str) -> Path | None:
        group, slash, name = config_path.removesuffix(".yaml").partition("/")
        if not slash or group not in (*GROUPS, RECIPE_GROUP):
            return None
        return _active.file_of(group, name)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file with its header."""
        file = self._file(config_path)
        if file is None:
            raise ConfigLoadError(f"{config_path} not found")
        text = file.read_text(encoding="utf-8")
        config = OmegaConf.create(read_yaml(text) or {})
        for key in _unusable.get(file, ()):
            _leave_out(config, key)
        for mapping in _given:
            _leave_out(config, mapping if config_path.startswith(f"{RECIPE_GROUP}/") else mapping.partition(".")[2])
        for section in _present:
            owner, _, name = section.partition(".")
            if config_path.startswith(f"{owner}/") and config.get(name) is None:
                config[name] = {}
        header = ConfigSource._get_header_dict(text)
        if config_path.startswith(f"{RECIPE_GROUP}/"):
            header["package"] = "_global_"
            _name_bases(config, _bases.get(file, {}))
        return ConfigResult(config=config, path=str(file), provider=self.provider, header=header)

    def available(self) -> bool:
        """Say that the source can be read."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Say whether `config_path` is a group that this source has options of."""
        return config_path == "" or (config_path in (*GROUPS, RECIPE_GROUP) and bool(_active.options_of(config_path)))

    def is_config(self, config_path: str) -> bool:
        """Say whether `config_path` is a file of this source."""
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the groups, or the options of one."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [*GROUPS, RECIPE_GROUP]
        return [] if results_filter == ObjectType.GROUP else list(_active.options_of(config_path))


def _name_bases(config: DictConfig, aliases: dict[str, str]) -> None:
    """Write aliases for the recipes that a recipe builds on, and put its overrides last, as Hydra wants them."""
    entries = [aliases.get(entry, entry) if isinstance(entry, str) else entry for entry in config.get("defaults") or []]
    if entries:
        config["defaults"] = sorted(entries, key=lambda entry: not isinstance(entry, str))


def _leave_out(config: DictConfig, key: str) -> None:
    owner, _, name = key.rpartition(".")
    node = OmegaConf.select(config, owner) if owner else config
    if node is not None:
        node.pop(name, None)
