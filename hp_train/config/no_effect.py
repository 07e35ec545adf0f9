"""Settings that differ from their default and yet change nothing in this run: each is a warning. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hp_train import registry
from hp_train.config.numbers import spell
from hp_train.config.rules_slurm import SLURM_KEYS, container_of
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import LEAVES, value_at

_PP_OPTIONS = ("overlap", "swap_min_gap", "data_steps", "trace_steps")


def find(config: TrainerConfig) -> list[str]:
    """Return one line for each setting of `config` without effect, naming what would give it one."""
    found = []
    for keys, reason in _idle(config):
        for key in keys:
            value = value_at(config, key)
            if value != LEAVES[key].default:
                found.append(f"{key}={spell(value)} has no effect: {reason}")
    return [*found, *_never_reached(config)]


def _idle(config: TrainerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys that nothing reads in this run, and why."""
    yield from _idle_in_mesh(config)
    yield from _idle_in_loop(config)
    yield from _idle_in_launcher(config)
    yield from _idle_of_plugins(config)
    trainer, data = config.trainer, config.data
    if data.mix:
        yield ("data.name", "data.path", "data.val_path"), "data.mix names its sources, which hold out a tenth each"
    elif data.name != "tokens":
        yield ("data.path", "data.val_path"), f"data={data.name} reads no folder"
    if set(data.sources) - set(data.mix):
        yield ("data.sources",), f"data.mix does not take {', '.join(sorted(set(data.sources) - set(data.mix)))}"
    if data.name == "random" and not data.mix:
        yield ("data.tokenizer", "data.document_boundaries"), "data=random has no text"
    if trainer.run_dir is not None:
        yield ("trainer.run_name", "trainer.runs_root"), f"trainer.run_dir={trainer.run_dir} is the folder itself"


def _idle_in_mesh(config: TrainerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    accelerator, fsdp = config.accelerator, config.fsdp
    if accelerator.tp_size == 1:
        yield ("accelerator.sequence_parallel", "accelerator.loss_parallel"), "accelerator.tp_size=1"
    if accelerator.pp_size == 1:
        idle = tuple(
            f"pp.{name}" for name in ("schedule", "stages_per_rank", "layer_split", "p2p_transport", *_PP_OPTIONS)
        )
        yield idle, "accelerator.pp_size=1 makes no pipeline"
    if fsdp.dp_mode == "ddp":
        yield ("fsdp.reshard_after_forward",), "fsdp.dp_mode=ddp shards nothing"
    elif fsdp.dp_shard_size == 1:
        yield ("fsdp.reshard_after_forward",), "fsdp.dp_shard_size=1 shards nothing"


def _idle_in_loop(config: TrainerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if config.trainer.eval_every == 0:
        yield ("trainer.eval_batches", "data.val_path"), "trainer.eval_every=0 never evaluates"
    if not config.metrics.wandb:
        yield ("metrics.wandb_project",), "metrics.wandb=false"
    if config.optimizer.name == "sgd":
        yield ("optimizer.betas", "optimizer.eps"), "optimizer=sgd has no moments"
    if config.lr_scheduler.name == "constant":
        yield ("lr_scheduler.min_lr_ratio", "lr_scheduler.total_steps"), "lr_scheduler=constant does not fall"
    if config.activation_checkpoint.mode == "none":
        yield ("activation_checkpoint.every",), "activation_checkpoint.mode=none recomputes nothing"
    if config.checkpoint.every == 0:
        idle = ("checkpoint.every_minutes", "checkpoint.keep_every", "checkpoint.async_save", "checkpoint.on_failure")
        yield idle, "checkpoint.every=0 saves only when a signal stops the run"
    if config.trainer.run_dir is None and config.trainer.resume == "auto":
        yield ("trainer.resume",), "without trainer.run_dir each run is a new one"


def _idle_in_launcher(config: TrainerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    launcher = config.launcher
    if launcher.name == "inline":
        yield ("launcher.max_restarts",), "launcher=inline starts nothing again"
    if launcher.name != "slurm":
        yield SLURM_KEYS, f"launcher={launcher.name} submits no job"
    elif launcher.continue_by == "none":
        yield ("launcher.max_requeues",), "launcher.continue_by=none never goes on by itself"
    if launcher.container is not None:
        if launcher.name != "slurm":
            yield ("launcher.container.runtime",), f"launcher={launcher.name} starts no container"
        elif container_of(config).runtime == "none":
            idle = ("launcher.container.image", "launcher.container.mounts", "launcher.container.python")
            yield idle, "launcher.container.runtime=none starts no container"


def _idle_of_plugins(config: TrainerConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    for component in registry.components():
        chooser = registry.NAME_KEYS[component.kind]
        chosen = value_at(config, chooser)
        keys = tuple(key for key in LEAVES if component.config and key.startswith(f"{component.section}."))
        if chosen != component.name:
            yield keys, f"{chooser}={chosen} does not read it"
        elif component.kind == "pp_schedule" and config.accelerator.pp_size == 1:
            yield keys, "accelerator.pp_size=1 makes no pipeline"


def _never_reached(config: TrainerConfig) -> Iterator[str]:
    """What would begin after the last step."""
    scheduler, max_steps = config.lr_scheduler, config.trainer.max_steps
    if scheduler.warmup_steps >= max_steps and scheduler.name != "constant":
        yield (
            f"lr_scheduler.name={scheduler.name} has no effect: lr_scheduler.warmup_steps={scheduler.warmup_steps} "
            f"does not end before trainer.max_steps={max_steps}"
        )
    late = [step for step in config.metrics.profile_steps if step > max_steps]
    if late:
        yield f"metrics.profile_steps={spell(late)} has no effect: the run ends at trainer.max_steps={max_steps}"
