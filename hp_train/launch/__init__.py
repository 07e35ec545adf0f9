"""Where a run happens: run directory, devices, processes, signals, failures, and what the terminal shows.

`start.start_run`, `start.resume_run` and `start.machine_faults` are what the command calls. Everything here but
`agent`, `local`, `worker` and `out_of_memory` imports without torch, so that faults are told before torch is loaded.
"""
