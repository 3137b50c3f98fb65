"""Protocol buffers of treadle: the schema and its generated Python code."""
