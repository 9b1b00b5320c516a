"""Options of Flower for the tiers: celery -A vision flower --conf=config/flowerconfig.py."""

from inference_tasks.observe.flower import flower_options

globals().update(flower_options())
