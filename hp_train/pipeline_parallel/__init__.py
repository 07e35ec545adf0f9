"""The pipeline engine: executes a proven schedule on the ranks of a pipeline."""

from __future__ import annotations

from hp_train.pipeline_parallel.mailbox import RecvInfo
from hp_train.pipeline_parallel.microbatch import BatchDimSpec, StageInputs, merge_outputs, split_inputs
from hp_train.pipeline_parallel.runtime import PipelineRuntime
from hp_train.pipeline_parallel.sentinel import PipelineError, PipelineHang
from hp_train.pipeline_parallel.stage import ModuleStage, Stage
from hp_train.pipeline_parallel.step_run import StepRun

__all__ = [
    "BatchDimSpec",
    "ModuleStage",
    "PipelineError",
    "PipelineHang",
    "PipelineRuntime",
    "RecvInfo",
    "Stage",
    "StageInputs",
    "StepRun",
    "merge_outputs",
    "split_inputs",
]
