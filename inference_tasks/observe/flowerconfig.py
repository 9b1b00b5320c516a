"""The file that Flower is given where there is no checkout; never imported."""

from inference_tasks.observe.flower import flower_options

globals().update(flower_options())
