"""Plugins that need more than is installed."""


class MissingExtraError(ImportError):
    """Raised by a plugin while it is imported when an optional dependency of its own is not installed.

    The plugin is listed as failed with the message, which should say what to install. It is no fault: nothing is
    logged, and `--strict-plugins` passes over it.
    """
