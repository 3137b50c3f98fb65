"""The version of the installed server."""

from importlib.metadata import version

VERSION = version("treadle-server")
