"""The decoder in pure NumPy; see README.md beside this file."""
