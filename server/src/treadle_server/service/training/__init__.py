"""The trainer as a service: what a call says, one thread that does the calls in order, and its life as a server."""
