"""Default ports of the platform."""

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
