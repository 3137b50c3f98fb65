"""One module a `model_type`, and the registry that finds them."""
