"""Three service classes for GPU inference on Celery and RabbitMQ."""
