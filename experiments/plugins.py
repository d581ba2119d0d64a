"""Lets other packages bring configurations: whoever names a config package under the entry point
`playground.configs` finds its groups beside ours, with no change here."""

from __future__ import annotations

from importlib.metadata import entry_points

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

ENTRY_POINTS = "playground.configs"


class InstalledConfigs(SearchPathPlugin):
    """Each entry point's value is a package of YAML files, such as `mypkg.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in entry_points(group=ENTRY_POINTS):
            search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


def register() -> None:
    Plugins.instance().register(InstalledConfigs)
