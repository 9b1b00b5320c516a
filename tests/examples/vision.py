from inference_tasks import InferenceApp

app = InferenceApp("vision")


@app.model
def network() -> dict[str, str]:  # loaded once in each worker process, before its first task
    return {"png": "picture", "txt": "text"}


@app.inference(tier="realtime", timeout_s=10.0)
def classify(path: str) -> str:
    return network().get(path.rpartition(".")[2], "unknown")
