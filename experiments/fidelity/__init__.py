"""Runs on hardware beside their simulation: a plan of them, their twins, and what the decisions and steps say."""
