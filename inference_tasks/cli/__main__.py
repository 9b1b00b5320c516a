"""``python -m inference_tasks.cli``: the command line, where the script is not installed."""

from inference_tasks.cli import main

if __name__ == "__main__":
    main(prog_name="inference-tasks")
