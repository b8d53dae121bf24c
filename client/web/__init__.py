"""The page of ``probingctl web``: a server that asks nodes as any other client does, and the page's files."""
