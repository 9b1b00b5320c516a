"""The state of tasks in Redis: records, claims, results and the workers that are alive.

RabbitMQ is the truth about work, this package about state. Every change of state is one Lua script, so it happens
whole or not at all; only the Redis server's clock is asked. Redis errors stop here and leave as
``StateUnavailableError``.
"""
