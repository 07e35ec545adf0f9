"""What a run is: one typed dataclass tree with the root `TrainerConfig`. Ground floor, no torch.

Group files under `configs/` carry values, never schemas. Every field has a docstring with type, unit, default and
bounds; a test holds those words equal to the field. Rules that need more than one field are in `config.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Union  # OmegaConf resolves these names at run time

from hp_train.config.fields import choice, file_path, number

MAX_COUNT = 10**9
MAX_TOKENS = 10**8


@dataclass
class TrainerSection:
    """The training loop: length, batch, precision, logging, where results go."""

    max_steps: int = number(1000, 1, MAX_COUNT)
    """Optimizer steps after which the run ends. Integer, steps; default 1000; 1 to 1e+09."""
    global_batch_size: int = number(8, 1, MAX_COUNT)
    """Sequences per optimizer step over the whole job. Integer, sequences; default 8; 1 to 1e+09."""
    micro_batch_size: int = number(1, 1, MAX_COUNT)
    """Sequences per forward on one rank, with or without a pipeline. Integer, sequences; default 1; 1 to 1e+09."""
    seq_len: int = number(128, 1, MAX_TOKENS)
    """Tokens per sequence. Integer, tokens; default 128; 1 to 1e+08."""
    seed: int = number(0, 0, 2**63 - 1)
    """Seed of initial weights and of the order of samples. Integer; default 0; 0 to 9.22337e+18."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """Where to train; auto takes CUDA devices where there are any. Text; default auto; auto, cpu, cuda."""
    precision: str = choice("auto", "auto", "fp32", "bf16")
    """Compute precision; auto is bf16 (fp32 master weights) on CUDA and fp32 on the CPU. Text; default auto; auto,
    fp32, bf16."""
    compile: bool = False
    """Compile each transformer block with torch.compile. Boolean; default false."""
    deterministic: bool = False
    """Use deterministic kernels only: the same bits in every run, slower on CUDA. Boolean; default false."""
    max_grad_norm: Optional[float] = number(1.0, 0, 1e9, low_open=True, also=(None,))
    """Clip the global gradient norm to this; null leaves gradients as they are. Number; default 1.0; above 0 to 1e+09
    or null."""
    loss_chunk_tokens: int = number(4096, 0, MAX_COUNT)
    """Tokens whose logits are held at once in the loss; 0 takes all at once. Integer, tokens; default 4096; 0 to
    1e+09."""
    loss: str = choice("cross_entropy", "cross_entropy")
    """What is minimised; plugins add others. Text; default cross_entropy; cross_entropy."""
    log_every: int = number(10, 1, MAX_COUNT)
    """Print a line every so many steps. Integer, steps; default 10; 1 to 1e+09."""
    eval_every: int = number(0, 0, MAX_COUNT)
    """Evaluate on held-out text every so many steps and at the end; 0 never. Integer, steps; default 0; 0 to 1e+09."""
    eval_batches: int = number(8, 1, MAX_COUNT)
    """Global batches per evaluation. Integer, batches; default 8; 1 to 1e+09."""
    run_dir: Optional[str] = file_path()
    """The run directory itself; null makes one under runs_root. Path; default null."""
    run_name: Optional[str] = None
    """Name of the folder under runs_root in place of the recipe's. Text; default null."""
    runs_root: Optional[str] = file_path()
    """Folder of all runs; null is $HP_TRAIN_RUNS, else ./runs. Path; default null."""
    resume: str = choice("never", "auto", "must", "never")
    """When trainer.run_dir holds a run: auto goes on with it or begins it, must goes on from a checkpoint or fails,
    never is refused. Text; default never; auto, must, never."""


@dataclass
class AcceleratorSection:
    """Sizes of the mesh dimensions other than data parallelism."""

    pp_size: int = number(1, 1, 4096)
    """Pipeline-parallel size. Integer, ranks; default 1; 1 to 4096."""
    tp_size: int = number(1, 1, 1024)
    """Tensor-parallel size; only 1 is supported yet. Integer, ranks; default 1; 1 to 1024."""
    cp_size: int = number(1, 1, 1024)
    """Context-parallel size; only 1 is supported yet. Integer, ranks; default 1; 1 to 1024."""
    ep_size: int = number(1, 1, 1024)
    """Expert-parallel size; only 1 is supported yet. Integer, ranks; default 1; 1 to 1024."""
    sequence_parallel: bool = False
    """Shard activations over tp between its regions; needs tp_size > 1. Boolean; default false."""
    loss_parallel: bool = False
    """Keep logits sharded over tp in the loss; needs tp_size > 1. Boolean; default false."""


@dataclass
class FsdpSection:
    """Data parallelism: how parameters, gradients and optimizer state are sharded and replicated."""

    dp_mode: str = choice("fsdp", "fsdp", "ddp", "hsdp")
    """fsdp shards, ddp replicates, hsdp does both. Text; default fsdp; fsdp, ddp, hsdp."""
    dp_shard_size: int = number(1, 1, 65536, also=(-1,))
    """Ranks that share one copy of the parameters; -1 takes all ranks that remain. Integer, ranks; default 1; 1 to
    65536 or -1."""
    dp_replicate_size: int = number(1, 1, 65536)
    """Copies of the parameters; counts in ddp and hsdp. Integer, ranks; default 1; 1 to 65536."""
    edp_shard_size: int = number(1, 1, 65536)
    """Ranks that share one copy of expert parameters; only 1 is supported yet. Integer, ranks; default 1; 1 to
    65536."""
    reshard_after_forward: Union[bool, str] = choice("auto", "auto", True, False)
    """Free gathered parameters after forward; auto is false with a pipeline, true otherwise. Boolean or auto; default
    auto; auto, true, false."""
    implementation: str = choice("hsdp", "hsdp", "torch")
    """The sharding engine: our own or torch's FSDP2. Text; default hsdp; hsdp, torch."""


@dataclass
class PpSection:
    """Pipeline parallelism: the schedule and how stages are cut and talk."""

    schedule: str = "1f1b"
    """Name of the schedule. Text; default 1f1b; a name of the schedule registry or file:PATH."""
    microbatch_size: Optional[int] = number(None, 1, MAX_COUNT, also=(None,))
    """Sequences per micro-batch; null is trainer.micro_batch_size, and no other value is valid. Integer, sequences;
    default null; 1 to 1e+09 or null."""
    stages_per_rank: Optional[int] = number(None, 1, 64, also=(None,))
    """Stages on each pipeline rank; null is what the schedule needs. Integer, stages; default null; 1 to 64 or null."""
    layer_split: Optional[List[int]] = number(None, 0, 100_000, also=(None,))
    """Transformer layers of each stage in order; null splits evenly, embedding and head counted. List of integers,
    layers; default null; 0 to 100000 or null."""
    p2p_transport: str = choice("plain", "plain", "batch", "multi_stream", "boundary", "auto")
    """How stages exchange tensors; auto is the first of multi_stream, batch, plain under which the schedule is proven.
    Text; default plain; plain, batch, multi_stream, boundary, auto."""
    overlap: str = choice("none", "none", "f_b", "b_f")
    """Pair a forward with a neighbouring backward into one step, in the order named. Text; default none; none, f_b,
    b_f."""
    swap_min_gap: Optional[int] = number(None, 2, MAX_COUNT, also=(None,))
    """Move activations to host memory when at least so many compute steps lie between forward and backward; null never.
    Integer, steps; default null; 2 to 1e+09 or null."""
    data_steps: bool = False
    """Read data on the first stage's rank alone and send targets to the last stage's. Boolean; default false."""
    trace_steps: List[int] = number([], 1, MAX_COUNT)
    """Optimizer steps whose measured timeline is written beside the planned one. List of integers, steps; default []; 1
    to 1e+09."""


@dataclass
class RopeScalingSection:
    """Llama 3.1 scaling of rotary frequencies."""

    factor: float = number(8.0, 1, 1e6)
    """Factor by which low frequencies are slowed. Number; default 8.0; 1 to 1e+06."""
    low_freq_factor: float = number(1.0, 0, 1e6, low_open=True)
    """Wavelengths above original length over this are fully scaled. Number; default 1.0; above 0 to 1e+06."""
    high_freq_factor: float = number(4.0, 0, 1e6, low_open=True)
    """Wavelengths below original length over this are left alone. Number; default 4.0; above 0 to 1e+06."""
    original_max_position_embeddings: int = number(8192, 1, MAX_TOKENS)
    """Length the model was first trained at. Integer, tokens; default 8192; 1 to 1e+08."""


@dataclass
class ModelSection:
    """The shape of the model; the field names of the Llama family."""

    name: str = choice("llama", "llama")
    """Model family. Text; default llama; llama."""
    vocab_size: int = number(260, 1, 10**7)
    """Rows of the embedding. Integer, token ids; default 260; 1 to 1e+07."""
    dim: int = number(128, 1, 10**6)
    """Hidden size. Integer, features; default 128; 1 to 1e+06."""
    num_layers: int = number(4, 1, 100_000)
    """Transformer blocks. Integer, layers; default 4; 1 to 100000."""
    num_heads: int = number(4, 1, 100_000)
    """Query heads. Integer, heads; default 4; 1 to 100000."""
    num_kv_heads: Optional[int] = number(None, 1, 100_000, also=(None,))
    """Key and value heads; null is num_heads. Integer, heads; default null; 1 to 100000 or null."""
    ffn_dim: int = number(384, 1, 10**7)
    """Hidden size of the SwiGLU MLP. Integer, features; default 384; 1 to 1e+07."""
    norm_eps: float = number(1e-5, 0, 1, low_open=True, high_open=True)
    """Epsilon of RMSNorm. Number; default 1e-05; above 0 to below 1."""
    rope_theta: float = number(10_000.0, 1, 1e12, low_open=True)
    """Base of the rotary frequencies. Number; default 10000.0; above 1 to 1e+12."""
    rope_scaling: Optional[RopeScalingSection] = None
    """Llama 3.1 frequency scaling; null is none. Group; default null."""
    tie_embeddings: bool = False
    """Use the embedding as the output matrix. Boolean; default false."""
    max_seq_len: int = number(2048, 1, MAX_TOKENS)
    """Longest sequence the model accepts. Integer, tokens; default 2048; 1 to 1e+08."""
    pretrained: Optional[str] = file_path()
    """Hugging Face directory of a Llama (config.json, safetensors) that the run starts from: its config.json sets the
    keys above, its weights are loaded. Path; default null."""


@dataclass
class DataSection:
    """What is read and how documents become sequences."""

    name: str = choice("shakespeare", "shakespeare", "tokens", "random")
    """shakespeare ships with the package, tokens reads prepared files, random makes tokens up to measure speed. Text;
    default shakespeare; shakespeare, tokens, random."""
    path: Optional[str] = file_path()
    """Folder made by `hp-train data prepare`, or the prefix of Megatron's .bin and .idx, for name=tokens. Path; default
    null."""
    val_path: Optional[str] = file_path()
    """Folder of held-out text; null takes the last tenth of path. Path; default null."""
    tokenizer: str = file_path("byte")
    """byte, or the tokenizer file the folder was prepared with, which is then checked. Text or path; default byte."""
    document_boundaries: str = choice("attend", "attend", "isolate", "pad")
    """attend packs documents and attention crosses them; isolate packs them, attention and positions stay inside one;
    pad starts each document in a new sequence and leaves padding out of the loss. Text; default attend; attend,
    isolate, pad."""
    mix: Dict[str, float] = number({}, 0, 1e9, low_open=True)
    """Sources and their weights, taken in proportion to their sum, in place of name and path; a source is shakespeare
    or a name in sources. Mapping of names to numbers; default {}; above 0 to 1e+09."""
    sources: Dict[str, str] = file_path({})
    """Where the sources of mix are: a folder made by `hp-train data prepare`, or the prefix of Megatron's files.
    Mapping of names to paths; default {}."""


@dataclass
class OptimizerSection:
    """How parameters move."""

    name: str = choice("adamw", "adamw", "sgd")
    """adamw (fused on CUDA) or plain sgd. Text; default adamw; adamw, sgd."""
    lr: float = number(3e-4, 0, 100, low_open=True)
    """Peak learning rate. Number; default 0.0003; above 0 to 100."""
    betas: List[float] = number([0.9, 0.95], 0, 1, high_open=True)
    """Decay rates of AdamW's two moments. Two numbers; default [0.9, 0.95]; 0 to below 1."""
    eps: float = number(1e-8, 0, 1, low_open=True, high_open=True)
    """AdamW's epsilon. Number; default 1e-08; above 0 to below 1."""
    weight_decay: float = number(0.1, 0, 100)
    """Decoupled decay of matrices; vectors are never decayed. Number; default 0.1; 0 to 100."""


@dataclass
class LrSchedulerSection:
    """The learning rate over the steps."""

    name: str = choice("cosine", "cosine", "wsd", "linear", "constant")
    """Shape after the warm-up; wsd stays at the peak and falls over the last fifth. Text; default cosine; cosine, wsd,
    linear, constant."""
    warmup_steps: int = number(0, 0, MAX_COUNT)
    """Steps of linear rise from zero. Integer, steps; default 0; 0 to 1e+09."""
    total_steps: Optional[int] = number(None, 1, MAX_COUNT, also=(None,))
    """Steps over which the shape is stretched; null is trainer.max_steps. Integer, steps; default null; 1 to 1e+09 or
    null."""
    min_lr_ratio: float = number(0.1, 0, 1)
    """Final learning rate over the peak. Number; default 0.1; 0 to 1."""


@dataclass
class ActivationCheckpointSection:
    """Recompute activations in backward instead of keeping them."""

    mode: str = choice("none", "none", "full", "selective")
    """full recomputes whole blocks; selective keeps the matrix products and attention and recomputes the rest. Text;
    default none; none, full, selective."""
    every: int = number(1, 1, 100_000)
    """Apply it to every so many blocks. Integer, layers; default 1; 1 to 100000."""


@dataclass
class CheckpointSection:
    """When state is saved and how much of it is kept."""

    every: Optional[int] = number(None, 0, MAX_COUNT, also=(None,))
    """Save every so many steps, and at the end; null goes by every_minutes and saves at the end; 0 saves only when a
    signal stops the run. Integer, steps; default null; 0 to 1e+09 or null."""
    every_minutes: Optional[float] = number(15.0, 0, 1e6, low_open=True, also=(None,))
    """Save when this much time has passed since the last; null never by time. Number, minutes; default 15.0; above 0 to
    1e+06 or null."""
    keep_last: int = number(3, 1, MAX_COUNT)
    """Complete checkpoints to keep. Integer, checkpoints; default 3; 1 to 1e+09."""
    keep_every: Optional[int] = number(None, 1, MAX_COUNT, also=(None,))
    """Also save at multiples of this step, and keep those for good; null keeps none. Integer, steps; default null; 1 to
    1e+09 or null."""
    async_save: bool = False
    """Write in the background while training goes on. Boolean; default false."""
    on_failure: str = choice("warn", "warn", "stop")
    """When a save fails (disk full, folder lost): warn and train on, or stop the run. Text; default warn; warn,
    stop."""


@dataclass
class MetricsSection:
    """Where figures go besides metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run directory. Boolean; default false."""
    wandb: bool = False
    """Send the figures to Weights & Biases, offline with $WANDB_MODE=offline. Boolean; default false."""
    wandb_project: str = "hp-train"
    """Project that the run appears in at Weights & Biases. Text; default hp-train."""
    profile_steps: List[int] = number([], 1, MAX_COUNT)
    """Optimizer steps that torch's profiler and the memory recorder write into the run's folder profile/. List of
    integers, steps; default []; 1 to 1e+09."""


@dataclass
class ContainerSection:
    """The container that a SLURM job's processes run in; SLURM's own commands stay outside."""

    runtime: str = choice("none", "none", "pyxis", "apptainer")
    """What starts it: SLURM's plugin pyxis, or apptainer. Text; default none; none, pyxis, apptainer."""
    image: Optional[str] = None
    """The image, as the runtime names it: a file or an address. Text; default null."""
    mounts: List[str] = field(default_factory=list)
    """Folders to mount besides those of run, data and code. List of texts SOURCE or SOURCE:TARGET; default []."""
    python: str = "python3"
    """The Python inside that torch is installed for. Path or command; default python3."""


@dataclass
class LauncherSection:
    """Where processes run."""

    name: str = choice("local", "local", "slurm", "inline")
    """local starts processes on this machine, slurm submits a job, inline trains in the command's own process, for
    debugging. Text; default local; local, slurm, inline."""
    nproc_per_node: Union[int, str] = number("auto", 1, 4096, also=("auto",))
    """Processes per machine; auto is what the mesh asks for. Integer or auto, processes; default auto; 1 to 4096 or
    auto."""
    nodes: int = number(1, 1, 100_000)
    """Machines. Integer; default 1; 1 to 100000."""
    max_restarts: int = number(0, 0, 1000)
    """Times a failed run is started again from its last checkpoint. Integer; default 0; 0 to 1000."""
    failure_timeout: float = number(600.0, 1, 1e6)
    """A rank that fails or hangs ends the attempt within this time; a longer step counts as hung. Number, seconds;
    default 600.0; 1 to 1e+06."""
    first_step_timeout: float = number(1800.0, 1, 1e6)
    """The same until the first step is through, which builds, loads and compiles. Number, seconds; default 1800.0; 1 to
    1e+06."""
    health_check: Union[bool, str] = choice("auto", "auto", True, False)
    """Measure each rank before the first step (2 s of matrix products and all-reduce); auto does on several nodes.
    Boolean or auto; default auto; auto, true, false."""
    account: Optional[str] = None
    """SLURM's --account. Text; default null."""
    partition: Optional[str] = None
    """SLURM's --partition; null is the cluster's default. Text; default null."""
    qos: Optional[str] = None
    """SLURM's --qos. Text; default null."""
    constraint: Optional[str] = None
    """SLURM's --constraint: features that nodes must have. Text; default null."""
    exclude: Optional[str] = None
    """SLURM's --exclude: nodes not to use. Text, node list; default null."""
    array: Optional[str] = None
    """Task numbers of a job array, one run each, e.g. 0-3%2; $SLURM_ARRAY_TASK_ID may stand in the config. Text;
    default null."""
    dependency: Optional[str] = None
    """SLURM's --dependency of the first submission, e.g. afterok:4711. Text; default null."""
    modules: List[str] = field(default_factory=list)
    """Environment modules to load in the job. List of texts; default []."""
    env: List[str] = field(default_factory=list)
    """Environment variables to set in the job. List of texts NAME=VALUE; default []."""
    extra_lines: List[str] = field(default_factory=list)
    """Lines for the job script as they are: #SBATCH lines go to its head, shell commands before the launch. List of
    texts; default []."""
    time: Optional[str] = None
    """Time limit of the job; null is the partition's. Duration such as 90m, 12h, 24:00:00, 1-00:00:00; default null."""
    cpus_per_node: Optional[int] = number(None, 1, 100_000, also=(None,))
    """Cores to ask for on each node; null takes whole nodes. Integer, cores; default null; 1 to 100000 or null."""
    gpu_request: str = "gpus_per_node"
    """How GPUs are asked for: gpus_per_node, gres, or none; a type may follow a colon (gres:h100). Text; default
    gpus_per_node."""
    signal_lead: str = "2m"
    """How long before the time limit a job is told to save and end. Duration; default 2m."""
    max_requeues: int = number(100, 0, MAX_COUNT)
    """Times a job goes on after its first start, however it ended. Integer; default 100; 0 to 1e+09."""
    continue_by: str = choice("auto", "auto", "requeue", "resubmit", "none")
    """How a job that was stopped or failed goes on; auto requeues, and resubmits where requeueing is forbidden. Text;
    default auto; auto, requeue, resubmit, none."""
    snapshot: bool = True
    """Run from a copy of the code that is made in the run directory at submission. Boolean; default true."""
    container: Optional[ContainerSection] = None
    """The container to run in; null is none. Group; default null."""


@dataclass
class TrainerConfig:
    """A whole run: the root of the tree."""

    trainer: TrainerSection = field(default_factory=TrainerSection)
    """The training loop. Group."""
    accelerator: AcceleratorSection = field(default_factory=AcceleratorSection)
    """The mesh. Group."""
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    """Data parallelism. Group."""
    pp: PpSection = field(default_factory=PpSection)
    """Pipeline parallelism. Group."""
    model: ModelSection = field(default_factory=ModelSection)
    """The model. Group."""
    data: DataSection = field(default_factory=DataSection)
    """The data. Group."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    """The optimizer. Group."""
    lr_scheduler: LrSchedulerSection = field(default_factory=LrSchedulerSection)
    """The learning rate. Group."""
    activation_checkpoint: ActivationCheckpointSection = field(default_factory=ActivationCheckpointSection)
    """Activation checkpointing. Group."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    """Checkpoints. Group."""
    metrics: MetricsSection = field(default_factory=MetricsSection)
    """Metrics. Group."""
    launcher: LauncherSection = field(default_factory=LauncherSection)
    """The launcher. Group."""

    @property
    def fsdp_config(self) -> FsdpSection:
        """`fsdp` under the name that the PassConfig contract uses."""
        return self.fsdp

    @property
    def pp_config(self) -> PpSection:
        """`pp` under the name that the PassConfig contract uses."""
        return self.pp
