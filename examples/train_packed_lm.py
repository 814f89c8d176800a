r"""Trains a small decoder on packed text with context-parallel attention.

    python examples/train_packed_lm.py --demo --out demo_output
    python examples/train_packed_lm.py --preset 1b --platform gpu --cp 8 --steps 1000

The text is the Python standard library found on this machine; nothing is downloaded. Each batch is
planned on the host while the devices run the one before, and every plan runs the same compiled
step. `--demo` trains on eight host devices, again on one device, and compares.
"""

import argparse
import os
import sys
from pathlib import Path

from fcp_jax.config import METHODS, TRANSPORTS

PRESETS = {
    "demo": dict(
        model=dict(features=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
        | dict(mlp_features=1152),
        train=dict(steps=30),
        plan=dict(tokens_per_rank=1056, block_size=128),
        mesh=(2, 4),
        platform="cpu",
    ),
    # The shape of Llama 3.2 1B, but for its vocabulary.
    "1b": dict(
        model=dict(features=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64)
        | dict(mlp_features=8192, rope_theta=500000.0, dtype="bfloat16", remat=True, layout="plan"),
        train=dict(steps=1000, peak_lr=3e-4, warmup_steps=100),
        plan=dict(tokens_per_rank=8192, block_size=1024),
        mesh=(1, 8),
        platform="gpu",
    ),
}


def positive(text: str) -> int:
    """Parses a positive integer."""
    value = int(text)
    if value < 1:
        raise ValueError(f"must be positive, got {value}")
    return value


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; what a preset decides is None unless given."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--demo", action="store_true", help="compare with one device, draw")
    parser.add_argument("--out", type=Path, default=Path("train_output"), metavar="DIR")
    parser.add_argument("--steps", type=positive, help="length of the learning rate schedule")
    parser.add_argument(
        "--stop-at", type=positive, metavar="STEP", help="stop early, to resume later"
    )
    parser.add_argument("--dp", type=positive, help="data-parallel groups, one row each")
    parser.add_argument("--cp", type=positive, help="context-parallel ranks of a row")
    parser.add_argument("--tokens-per-rank", type=positive)
    parser.add_argument("--block-size", type=positive)
    parser.add_argument("--layout", choices=("caller", "plan"))
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--method", choices=METHODS, default="fcp", help="planner")
    parser.add_argument("--platform", choices=("cpu", "gpu"))
    parser.add_argument(
        "--checkpoint-every",
        type=positive,
        metavar="STEPS",
        help="default: at the end, never for --demo",
    )
    parser.add_argument("--resume", action="store_true", help="from the latest in DIR/checkpoints")
    return parser.parse_args(argv)


def use_host_devices(count: int) -> None:
    """Makes jax see `count` CPU devices; must run before anything imports jax."""
    add_xla_flags({"xla_force_host_platform_device_count": count})
    os.environ["JAX_PLATFORMS"] = "cpu"


def add_xla_flags(options: dict) -> None:
    """Adds flags to the environment; XLA reads it when the first device is asked for."""
    flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def main(argv: list[str]) -> None:
    """Runs the command line."""
    arguments = parse_arguments(argv)
    preset = PRESETS[arguments.preset]
    dp, cp = arguments.dp or preset["mesh"][0], arguments.cp or preset["mesh"][1]
    platform = arguments.platform or preset["platform"]
    if platform == "cpu":
        use_host_devices(dp * cp)

    import jax
    from jax.sharding import AxisType
    from packed_lm import report
    from packed_lm.data import PackedCorpus, standard_library
    from packed_lm.model import ModelConfig
    from packed_lm.training import TrainConfig, Trainer

    import fcp_jax as fcp

    def settings(names: str, defaults: dict) -> dict:
        """The preset's values with those of the command line in their place."""
        given = {name: getattr(arguments, name) for name in names.split()}
        return defaults | {name: value for name, value in given.items() if value is not None}

    model_config = ModelConfig(**settings("layout", preset["model"]))
    train_config = TrainConfig(**settings("steps", preset["train"]))
    plan_config = fcp.PlanConfig(
        num_ranks=cp,
        num_q_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        kv_dtype=model_config.dtype,
        **settings("tokens_per_rank block_size transport method", preset["plan"]),
    )
    corpus = PackedCorpus(
        standard_library(),
        num_rows=dp,
        capacity=plan_config.capacity,
        # Longer than two ranks' tokens: however it is aligned, it lies on three ranks.
        long_segment=min(2 * plan_config.tokens_per_rank + 1, plan_config.capacity),
        seed=train_config.seed,
    )
    if platform == "gpu":
        first_plan = fcp.make_batch_plan(corpus.batch(0).segments, plan_config)
        add_xla_flags(fcp.gpu_compiler_options(first_plan))

    def trainer_on(mesh):
        return Trainer(model_config, train_config, plan_config, corpus, mesh)

    trainer = trainer_on(jax.make_mesh((dp, cp), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2))
    checkpoints = arguments.out / "checkpoints"
    if arguments.resume:
        if not trainer.restore(checkpoints):
            sys.exit(f"--resume: there is no checkpoint in {checkpoints}")
        print(f"resumed after step {trainer.step}")
    first, until = trainer.step, arguments.stop_at or train_config.steps
    every = arguments.checkpoint_every or (0 if arguments.demo else until)
    if every and not arguments.resume and checkpoints.exists():
        sys.exit(f"{checkpoints} holds another run: use --resume, or another --out")
    print(
        f"{trainer.num_parameters:,} parameters, {dp} x {cp} devices ({jax.default_backend()}), "
        f"{dp} x {plan_config.capacity} tokens a step, layout {model_config.layout!r}"
    )

    def train(trainer, save: bool) -> list:
        records = []
        for record in trainer.run(until):
            print(report.progress_line(record, train_config.steps), flush=True)
            records.append(record)
            if arguments.demo and record.widest_segment < min(3, cp):
                raise RuntimeError(f"no segment of step {record.step} is on three ranks or more")
            if save and every and (trainer.step % every == 0 or trainer.step == until):
                trainer.save(checkpoints)
        return records

    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = {f"dp x cp = {dp} x {cp}": train(trainer, save=True)}
    if arguments.demo and not first:
        print("the same on one device")
        runs["one device"] = train(trainer_on(None), save=False)
    report.write(arguments.out, trainer, runs)


if __name__ == "__main__":
    main(sys.argv[1:])
