"""Plugins: finding, loading and listing them."""

from treadle_server.plugins.manager import PluginManager, PluginStatus
from treadle_server.plugins.registry import KnobEntry, StageEntry, StageRegistry

__all__ = ["KnobEntry", "PluginManager", "PluginStatus", "StageEntry", "StageRegistry"]
