"""The admin API: HTTP in, calls to the control plane's owners out. It decides nothing about the cluster."""
