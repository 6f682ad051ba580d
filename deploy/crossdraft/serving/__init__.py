"""What clients touch: HTTP, gRPC and a page before the pipelines, in one process or over a cluster."""
