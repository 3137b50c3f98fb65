"""The engine: requests, sequences, the scheduler, sampling chains, and the step that ties them together."""
