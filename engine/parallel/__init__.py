"""Many ranks: which rank computes what, how ranks speak to one another, and the driver that speaks to all of them."""
