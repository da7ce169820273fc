"""Settings: the vocabulary of `params.yaml`, of the Prefect form and of the parameters that MLflow records."""
