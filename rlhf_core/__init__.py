"""How to learn from feedback: stages, algorithms and artifacts, with no knowledge of Prefect or MLflow."""

__version__ = "0.1.0"
