"""Checkpoint files to parameters and back; see README.md beside this file."""
