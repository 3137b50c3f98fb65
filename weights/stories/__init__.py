"""Small stories about a cat and a mouse, in English and Chinese, told by grammars: what the model `stories` learned."""
