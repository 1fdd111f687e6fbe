"""Where the platform listens if nothing else is asked for."""

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
