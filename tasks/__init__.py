"""One task per stage: files in, files out, retries, progress and tracking around `comlrl_core`."""
