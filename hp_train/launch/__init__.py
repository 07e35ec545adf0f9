"""Where a run happens: run directory, devices, processes, signals, failures, and what the terminal shows.

`start.start_run`, `start.resume_run` and `start.machine_faults` are what the command calls. Everything here but
`agent`, `attempt`, `collective_probe`, `local` and `nodes` imports without torch: faults are told before it is loaded.
"""
