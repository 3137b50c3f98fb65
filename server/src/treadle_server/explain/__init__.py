"""A walk through everything a model computes, for people who have never seen it: content here, rendering apart."""
