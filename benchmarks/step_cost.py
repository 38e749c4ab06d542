"""Milliseconds of one target forward over N rows, by backend, and the least this machine allows.

Every process times all backends in turn, and the median over several processes is taken: the same
program lands in different memory regimes from process to process. Prints tables, then one JSON
document.

    python benchmarks/step_cost.py --backends native,torch,llamacpp:Q4_0,hf --rows 1,2,4,8,16,32

The roofline is that of int8 weights: the longer of reading all weights once at the measured
bandwidth, and of the operations at the measured rate of the innermost product on near data. Both
are measured between the timed steps, and medians are taken like theirs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import entmtp
from entmtp.decoder.rope import RopeScaling
from entmtp.errors import InputError
from entmtp.loading.assets import resolve_model
from entmtp.loading.gguf_writer import write_gguf
from entmtp.target.base import TargetConfig
from entmtp.target.weights import read_config, tensor_shapes, write_model
from paired import machine, print_json
from step_backends import BACKENDS, MAX_ROWS, num_weights, obstacle, run_worker, weight_bytes

_LLAMA3 = RopeScaling(
    "llama3", factor=32.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
SHAPES = {
    "qwen2.5-0.5b": TargetConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        context_window=32768,
        rope_theta=1e6,
        qkv_bias=True,
        tie_embeddings=True,
    ),
    "llama-3.2-1b": TargetConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        context_window=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=_LLAMA3,
        tie_embeddings=True,
    ),
}
"""Models of random weights; the first shape, smollm2-135m, is the pulled model itself."""


@dataclass(frozen=True)
class Spread:
    """Median, least and largest over processes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backends",
        default="native,torch,llamacpp:Q4_0,llamacpp:Q8_0,llamacpp:BF16,hf",
        help=f"of {', '.join(BACKENDS)}; those that are not installed are left out",
    )
    parser.add_argument("--rows", default="1,2,4,8,16,32", help=f"each at most {MAX_ROWS}")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--shape", choices=("smollm2-135m", *SHAPES), default="smollm2-135m")
    parser.add_argument("--model", help="a folder or .gguf file, instead of a shape")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the JSON document to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.backends = list(dict.fromkeys(args.backends.split(",")))
    for name in args.backends:
        if name not in BACKENDS:
            parser.error(f"backend {name!r}: it must be one of {', '.join(BACKENDS)}")
    args.rows = [int(text) if text.isdecimal() else 0 for text in args.rows.split(",")]
    if not all(1 <= rows <= MAX_ROWS for rows in args.rows):
        parser.error(f"--rows: give whole numbers from 1 to {MAX_ROWS}, such as 1,8")
    for name, most in (
        ("context", 1 << 20),
        ("threads", 64),
        ("repeats", 10000),
        ("processes", 100),
    ):
        if not 1 <= getattr(args, name) <= most:
            parser.error(f"--{name}: give a whole number from 1 to {most}")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json}: give a file in a folder that is there")
    return args


def random_tensors(config: TargetConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of the usual size: norms of one, no biases, matrices of deviation 0.02."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in tensor_shapes(config).items():
        if name.endswith(".bias"):
            yield name, torch.zeros(shape)
        elif len(shape) == 1:
            yield name, torch.ones(shape)
        else:
            yield name, torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def prepare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the model and its GGUF files; what a process is told."""
    if args.model is None and args.shape in SHAPES:
        model = folder / args.shape
        model.mkdir()
        config = SHAPES[args.shape]
        write_model(model, config, random_tensors(config), dtype=torch.bfloat16)
    else:
        model = resolve_model(args.model or args.shape)
    config = read_config(model)
    if args.context + MAX_ROWS > config.context_window:
        raise InputError(
            f"context is {args.context}; with {MAX_ROWS} rows behind it, it must fit into the "
            f"context window of {config.context_window}"
        )
    backends, gguf = [], {}
    for name in args.backends:
        reason = obstacle(name, model, config)
        if reason is not None:
            print(f"{name} left out: {reason}", file=sys.stderr)
            continue
        backends.append(name)
        if name.startswith("llamacpp"):
            kind = name.partition(":")[2]
            write_gguf(model, folder / f"{kind}.gguf", kind)
            gguf[kind] = str(folder / f"{kind}.gguf")
    if not backends:
        raise InputError("no backend is left to time")
    names = ("rows", "context", "threads", "repeats")
    return {
        "model": str(model),
        "backends": backends,
        "gguf": gguf,
        **{name: getattr(args, name) for name in names},
    }


def run_process(spec_file: Path, home: Path | None) -> dict[str, Any]:
    """One process; it ends with this one, whatever ends this one.

    Raises:
        InputError: it failed, and has said why.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(spec_file)]
    env = os.environ | ({} if home is None else {"ENTMTP_HOME": str(home)})
    # a session of its own, so that Ctrl-C in a terminal reaches the process through this one
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - a pipe was asked for
    assert process.stdout is not None  # noqa: S101
    with process.stdin, process.stdout:
        try:
            out = process.stdout.read()
            process.wait()
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise InputError(f"a process of the benchmark ended with exit code {process.returncode}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def work(spec_file: Path) -> int:
    """What a process of the benchmark does: time what the file says, print one JSON line."""
    end_with_parent()
    try:
        spec = json.loads(spec_file.read_text(encoding="utf-8"))
    except OSError:  # the parent has ended and has taken its files along
        return 1
    print(json.dumps(run_worker(spec)))
    return 0


def end_with_parent() -> None:
    """End this process when its standard input closes, however the parent ended."""

    def wait() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock the interpreter wants at its end
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def roofline_ms(
    rows: int, weights: int, bandwidth_gb_s: float, throughput_gop_s: float | None
) -> float:
    """Least time of a forward in int8: weights of one byte, two operations a weight and row."""
    memory = weights / bandwidth_gb_s / 1e6
    if throughput_gop_s is None:
        return memory
    return max(memory, 2 * weights * rows / throughput_gop_s / 1e6)


def roofline_shares(
    rows: Sequence[int], weights: int, results: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Share of the roofline that the native core reaches, each process against its own."""
    shares = {}
    for count in rows:
        found = [
            roofline_ms(count, weights, max(r["bandwidth"].values()), r["throughput_gop_s"])
            / r["ms"]["native"][str(count)]
            for r in results
        ]
        shares[str(count)] = median(found)
    return shares


def combine(
    spec: dict[str, Any], config: TargetConfig, results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The report: medians and ranges over processes, rates, roofline."""
    weights = num_weights(config)
    best = [max(result["bandwidth"].items(), key=lambda item: item[1]) for result in results]
    bandwidth = Spread.of([value for _, value in best])
    found = [r["throughput_gop_s"] for r in results if r["throughput_gop_s"] is not None]
    throughput = Spread.of(found) if found else None
    peak = None if throughput is None else throughput.median
    report: dict[str, Any] = {key: {} for key in ("ms", "ms_range", "gb_s", "gop_s")}
    for name in spec["backends"]:
        for key in ("ms", "ms_range", "gb_s", "gop_s"):
            report[key][name] = {}
        for rows in map(str, spec["rows"]):
            spread = Spread.of([result["ms"][name][rows] for result in results])
            report["ms"][name][rows] = spread.median
            report["ms_range"][name][rows] = [spread.low, spread.high]
            report["gb_s"][name][rows] = weight_bytes(name, config) / spread.median / 1e6
            report["gop_s"][name][rows] = 2 * weights * int(rows) / spread.median / 1e6
    report["roofline_ms"] = {
        str(rows): roofline_ms(rows, weights, bandwidth.median, peak) for rows in spec["rows"]
    }
    if "native" in spec["backends"]:
        report["roofline_share"] = roofline_shares(spec["rows"], weights, results)
    return report | {
        "bandwidth_gb_s": bandwidth.median,
        "bandwidth_gb_s_range": [bandwidth.low, bandwidth.high],
        "bandwidth_by": sorted({name for name, _ in best}),
        "throughput_gop_s": peak,
        "throughput_gop_s_range": None if throughput is None else [throughput.low, throughput.high],
        "num_weights": weights,
        "native_backend": results[0]["native_backend"],
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="entmtp-step-cost-") as temporary:
        folder = Path(temporary)
        spec = prepare(args, folder)
        config = read_config(Path(spec["model"]))
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        is_random = Path(spec["model"]).parent == folder
        results = []
        for index in range(args.processes):
            started = time.monotonic()
            results.append(run_process(spec_file, folder / "home" if is_random else None))
            if sys.stderr.isatty():
                seconds = time.monotonic() - started
                print(f"process {index + 1}/{args.processes}: {seconds:.0f} s", file=sys.stderr)
    return {
        **machine(),
        "model": args.model or args.shape,
        "random_weights": is_random,
        "threads": args.threads,
        "context": args.context,
        "repeats": args.repeats,
        "processes": args.processes,
        **combine(spec, config, results),
    }


def print_table(report: dict[str, Any]) -> None:
    rows = list(report["roofline_ms"])
    print(
        f"{report['model']}, context {report['context']}, {report['threads']} threads; medians and "
        f"ranges over {report['processes']} processes of {report['repeats']} repeats"
    )
    print(f"{'ms':<16}" + "".join(f"{'N=' + n:>24}" for n in rows))
    for name, ms in report["ms"].items():
        cells = []
        for n in rows:
            low, high = report["ms_range"][name][n]
            cells.append(f"{ms[n]:.2f} ({low:.2f}-{high:.2f})")
        print(f"{name:<16}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"{'roofline int8':<16}" + "".join(f"{report['roofline_ms'][n]:>24.2f}" for n in rows))
    if "roofline_share" in report:
        shares = [f"{100 * report['roofline_share'][n]:.0f} %" for n in rows]
        print(f"{'native reaches':<16}" + "".join(f"{share:>24}" for share in shares))
    print(f"{'GB/s, GOP/s':<16}")
    for name in report["ms"]:
        pairs = [f"{report['gb_s'][name][n]:.1f}, {report['gop_s'][name][n]:.0f}" for n in rows]
        print(f"{name:<16}" + "".join(f"{pair:>24}" for pair in pairs))
    low, high = report["bandwidth_gb_s_range"]
    ways = " or ".join(report["bandwidth_by"])
    print(f"bandwidth {report['bandwidth_gb_s']:.1f} GB/s ({low:.1f}-{high:.1f}), read by {ways}")
    if report["throughput_gop_s"] is None:
        print("no integer throughput: the native core is missing; the roofline is memory alone")
    else:
        low, high = report["throughput_gop_s_range"]
        best = report["throughput_gop_s"]
        print(f"integer throughput {best:.0f} GOP/s ({low:.0f}-{high:.0f}), innermost product")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.worker is not None:
            return work(args.worker)
        report = run(args)
    except entmtp.EntmtpError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    print_table(report)
    print_json(report, args.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
