"""A policy's parameters, searched by Optuna: `playground sweep=optuna`."""
