"""Everything that talks to RabbitMQ: publishing with confirms, topology, depths, the management interface."""
