"""The text of job.sbatch: a pure function of the config and a few paths. No torch.

The script does all that takes SLURM's commands: it starts one launcher on each node through srun, passes on the warning
before the time limit, and, when the launchers have ended, asks `launch.slurm_end` what to do and does it. Values are
quoted, for sbatch in the #SBATCH lines and for bash below them, so that no name or path can run anything.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hp_train.config.durations import clock_text, parse_duration
from hp_train.config.rules_slurm import container_of
from hp_train.config.schema import ContainerSection, TrainerConfig
from hp_train.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the ports that Linux hands out by itself


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Where a job finds its things; all absolute."""

    run_dir: Path  # of an array: without the task number at its end
    config: str  # name of the config file in the run directory
    python: str  # the interpreter on the nodes, outside any container
    code: Path | None  # folder that holds the package when it is not installed for `python`
    data: tuple[Path, ...] = ()  # folders that the config reads, for containers


def job_script(config: TrainerConfig, recipe: str, nproc_per_node: int, paths: JobPaths) -> str:
    """Return the script that runs `config` as a SLURM job. Raises ConfigError if a path has no place in it."""
    _check_path(paths.run_dir)
    launcher = config.launcher
    head = [
        "#!/bin/bash",
        f"# {_comment(recipe or 'a run')}: {launcher.nodes} x {nproc_per_node} processes.",
        "# Written by `hp-train submit`. `sbatch job.sbatch` goes on with the run from its last checkpoint.",
        *_options(config, recipe, nproc_per_node, paths),
        *(line for line in launcher.extra_lines if _is_option(line)),
    ]
    return "\n".join([*head, "", *_settings(config, paths), "", _body(config, paths)]) + "\n"


def _check_path(path: Path) -> None:
    if re.search(r"[\x00-\x1f\x7f\\]", str(path)):
        raise ConfigError(
            f"run directory {str(path)!r} holds a line break, a backslash or a control character, which SLURM's "
            "scripts cannot carry; choose another trainer.run_dir, trainer.run_name or trainer.runs_root"
        )


def _is_option(line: str) -> bool:
    return line.startswith("#SBATCH")


def _comment(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text)


def _options(config: TrainerConfig, recipe: str, nproc_per_node: int, paths: JobPaths) -> list[str]:
    launcher = config.launcher
    array = launcher.array is not None
    output = f"{str(paths.run_dir).replace('%', '%%')}{'-%a' if array else ''}/slurm_%j.out"
    options: list[tuple[str, str | None]] = [
        ("job-name", config.trainer.run_name or recipe or "hp-train"),
        ("account", launcher.account),
        ("partition", launcher.partition),
        ("qos", launcher.qos),
        ("constraint", launcher.constraint),
        ("exclude", launcher.exclude),
        ("array", launcher.array),
        ("dependency", launcher.dependency),
        ("nodes", str(launcher.nodes)),
        ("ntasks-per-node", "1"),
        *_share_of_node(config, nproc_per_node),
        ("time", clock_text(parse_duration(launcher.time)) if launcher.time else None),
        ("signal", f"B:USR1@{parse_duration(launcher.signal_lead)}"),
        ("requeue" if launcher.continue_by in ("auto", "requeue") else "no-requeue", ""),
        ("open-mode", "append"),
        ("output", output),
    ]
    return [
        f"#SBATCH --{name}" + (f"={sbatch_quoted(value)}" if value else "")
        for name, value in options
        if value is not None
    ]


def _share_of_node(config: TrainerConfig, nproc_per_node: int) -> list[tuple[str, str | None]]:
    """Return what of a node is asked for: all of it, or a number of cores; and GPUs."""
    launcher = config.launcher
    if launcher.cpus_per_node is None:
        options: list[tuple[str, str | None]] = [("exclusive", ""), ("mem", "0")]
    else:
        options = [("cpus-per-task", str(launcher.cpus_per_node))]
    form, _, kind = launcher.gpu_request.partition(":")
    if config.trainer.device == "cpu" or form == "none":
        return options
    count = f"{kind}:{nproc_per_node}" if kind else str(nproc_per_node)
    return [*options, ("gpus-per-node", count) if form == "gpus_per_node" else ("gres", f"gpu:{count}")]


def sbatch_quoted(value: str) -> str:
    """Return `value` as one word of an #SBATCH line; sbatch reads quotes and backslashes there much as a shell does."""
    if re.fullmatch(r"[A-Za-z0-9_./:@%,=+\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _settings(config: TrainerConfig, paths: JobPaths) -> list[str]:
    """Return the lines that differ from run to run: paths, modules, environment, the user's own."""
    launcher, container = config.launcher, container_of(config)
    in_container = container.runtime != "none"
    task = '-"$SLURM_ARRAY_TASK_ID"' if launcher.array is not None else ""
    lines = [f"run_dir={shlex.quote(str(paths.run_dir))}{task}"]
    lines.append(f"python={shlex.quote(container.python if in_container else paths.python)}")
    if launcher.modules:
        lines.append("module load " + " ".join(map(shlex.quote, launcher.modules)))
    lines.extend(line for line in launcher.extra_lines if not _is_option(line))
    for item in launcher.env:
        name, _, value = item.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    if paths.code is not None:
        code = shlex.quote(str(paths.code)) if paths.code != paths.run_dir / "code" else '"$run_dir"/code'
        lines.append(f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines


def _body(config: TrainerConfig, paths: JobPaths) -> str:
    words = "_ code _" if config.launcher.continue_by == "none" else "action code exclude"
    step, judge = _commands(container_of(config), paths)
    return f"""set -u
restart=${{SLURM_RESTART_COUNT:-0}}
export HP_TRAIN_INCARNATION="$SLURM_JOB_ID.$restart"
marks="$run_dir/slurm/$HP_TRAIN_INCARNATION"
mkdir -p "$marks"
echo "$SLURM_JOB_ID" >"$run_dir/slurm/job_id"

# The launchers meet at the first node, on a port that nobody listens on there.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
export HP_TRAIN_RENDEZVOUS="$host:$port"
end=$(timeout 60 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
HP_TRAIN_END=$(date -d "$end" +%s 2>/dev/null) && export HP_TRAIN_END
down() {{ timeout 60 sinfo --noheader --states=down,fail --format=%n "$@" | sort -u | paste -sd,; }}
HP_TRAIN_DOWN=$(down) && export HP_TRAIN_DOWN # did a node take the start before along?
cores=$(tr ',' '\\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)

# The warning before the time limit comes to this script alone. A file tells launchers that do not listen yet.
step=
trap 'touch "$marks/stop"; [ -z "$step" ] || kill -USR1 "$step"' USR1
trap : TERM # SLURM tells the launchers itself; this script stays to see how they end

{step} {shlex.quote(paths.config)} &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done

# What now? srun's exit code does not tell; what the launchers wrote does, and the state that SLURM has the job in.
for _ in 1 2 3 4 5; do
    state=$(timeout 60 scontrol show job "$SLURM_JOB_ID" --oneliner) && break
    sleep 10
done
lost=$(down --nodes="$SLURM_JOB_NODELIST")
read -r {words} < <({judge} "$state" {shlex.quote(paths.config)} "$lost") || true
{_continuation(config, paths)}"""


def _continuation(config: TrainerConfig, paths: JobPaths) -> str:
    """Return the lines that queue the job again when `action` says so, once for each time that it ran."""
    launcher = config.launcher
    if launcher.continue_by == "none":
        return 'exit "${code:-1}"'
    lines = [
        'case "${action:-}" in requeue | resubmit) ;; *) exit "${code:-1}" ;; esac',
        'mkdir "$marks/continued" 2>/dev/null || exit "$code" # once for each time that the job ran',
    ]
    if launcher.continue_by != "resubmit":
        lines += [
            'if [ "$action" = requeue ] && scontrol requeue "$SLURM_JOB_ID"; then',
            '    [ -z "$exclude" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$exclude"',
            '    exit "$code"',
            "fi",
        ]
    if launcher.continue_by != "requeue":
        array = ' --array="$SLURM_ARRAY_TASK_ID"' if launcher.array is not None else ""
        lines += [
            "export HP_TRAIN_CONTINUED=$((${HP_TRAIN_CONTINUED:-0} + restart + 1))",
            f'next=$(sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID"{array} \\',
            '    ${exclude:+--exclude="$exclude"} "$run_dir"/job.sbatch) && echo "$next" >"$run_dir/slurm/job_id"',
        ]
    return "\n".join([*lines, 'exit "$code"'])


def _commands(container: ContainerSection, paths: JobPaths) -> tuple[str, str]:
    """Return the words that start the launchers on all nodes, and those that judge the end, here on the first."""
    srun = 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpus-per-task="$cores"'
    srun += " --cpu-bind=none --kill-on-bad-exit=1"
    launch = '"$python" -u -P -m hp_train.launch.slurm_job "$run_dir"'
    judge = '"$python" -u -P -m hp_train.launch.slurm_end "$run_dir"'
    # SIGUSR1 would end a Python that has not come to its handlers yet: it is ignored until then.
    deaf = """sh -c 'trap "" USR1; exec "$@"' sh """
    if container.runtime == "pyxis":
        mounts = ",".join(_mounts(container, paths))
        inside = f"--container-image={shlex.quote(container.image or '')}"
        inside += f' --container-mounts="$run_dir:$run_dir"{_comma(mounts)}'
        return (
            f"{srun} {inside} {deaf}{launch}",
            f"srun --overlap --nodes=1 --ntasks=1 {inside} {judge}",
        )
    if container.runtime == "apptainer":
        binds = "".join(f" --bind {shlex.quote(mount)}" for mount in _mounts(container, paths))
        inside = f'apptainer exec --nv --bind "$run_dir"{binds} {shlex.quote(container.image or "")}'
        return f"{srun} {inside} {deaf}{launch}", f"{inside} {judge}"
    return f"{srun} \\\n    {deaf}{launch}", judge


def _mounts(container: ContainerSection, paths: JobPaths) -> list[str]:
    """Return the user's mounts, and those of data and code where no other covers them."""
    wanted = [*paths.data, *([paths.code] if paths.code is not None else [])]
    own = [str(path) for path in dict.fromkeys(wanted) if not path.is_relative_to(paths.run_dir)]
    return [*(f"{path}:{path}" for path in own), *container.mounts]


def _comma(mounts: str) -> str:
    return f",{shlex.quote(mounts)}" if mounts else ""
