"""What runs when: Prefect flows, the command line, deployments, and the glue to DVC."""
