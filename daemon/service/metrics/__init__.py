"""The page /metrics for Prometheus, and the HTTP server that answers requests for it."""
