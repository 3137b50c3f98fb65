"""What a server tells of itself: metrics, traces and one log line a call."""
