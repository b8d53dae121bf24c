"""Files, servers and processes that an ordinary user makes to cost the daemon time, memory or rows of others."""
