"""What ``inference-tasks doctor`` looks at, one module for each place: the host, the broker, the state store."""
