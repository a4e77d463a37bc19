"""Who makes batches: the zygote, the crew of workers it forks, and their streams."""
