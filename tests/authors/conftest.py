"""What tests of the tools for authors share."""

from treadle_server.testing_plugins import isolated_registry

__all__ = ["isolated_registry"]
