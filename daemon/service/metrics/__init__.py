"""The page of /metrics for Prometheus, and the HTTP server that answers it."""
