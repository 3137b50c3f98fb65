"""Who may call what: certificates, tokens, roles, limits for each client, and the folders that RPCs may name."""
