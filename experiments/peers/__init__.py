"""Other people's simulators, and ours on their inputs."""
