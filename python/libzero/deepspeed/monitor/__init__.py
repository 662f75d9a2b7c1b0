"""deepspeed.monitor: metrics of a run."""
