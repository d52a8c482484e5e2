"""The options of every command, as data. Nothing heavy is imported here, so that `--help` is quick.

Values are taken as text and checked in `options.py`: argparse would end with exit code 2 and its own message for a
wrong value, which is kept for wrong usage.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from batchfinder.reproductions import REPRODUCTIONS
from batchfinder.training.spec import (
    ATTENTION_NAMES,
    COMPILED_PARTS,
    CUDA_BUILD,
    FAKE_DEVICE,
    GPUS_PER_NODE,
    LOSS_NAMES,
    MODES,
    OPTIMIZER_NAMES,
    PRECISION_NAMES,
    QUANTIZATION_NAMES,
    STRATEGIES,
)
from batchfinder.versions import installed

Options = Mapping[str, Mapping[str, Any]]
"""By the name of an option: what `ArgumentParser.add_argument` takes for it."""


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        summary: one line for `--help`.
        groups: its options, by their group's title; empty for no group. An option's other spellings stand beside it.
        commands: its own commands, where it has any.
    """

    summary: str
    groups: Mapping[str, Options]
    commands: Mapping[str, Command] | None = None


_MODEL = "NAME|OWNER/NAME|PATH|MODULE:FACTORY"
# Of the same destination as --model: what is not given leaves that alone.
_NAMED: Options = {
    "model": {"nargs": "?", "default": argparse.SUPPRESS, "metavar": "MODEL", "help": "the model, as by --model"}
}
_SEVERAL_NAMED: Options = {"model": {**_NAMED["model"], "nargs": "*", "help": "models, as by --model"}}
_ONE_SIZE: Options = {
    **_NAMED,
    "--model": {"default": "bert-base", "metavar": _MODEL, "help": "default: bert-base"},
    "--batch-size --per-device-train-batch-size": {
        "default": "8",
        "metavar": "N",
        "help": "samples in a GPU's micro-batch (default: 8)",
    },
    "--seq-len": {"metavar": "N", "help": "tokens, or pixels for images (default: 128 or 224)"},
    "--accumulation --gradient-accumulation-steps": {
        "default": "1",
        "metavar": "N",
        "help": "micro-batches per optimizer step (default: 1)",
    },
}


def _choice(names: tuple[str, ...], default: str | None) -> Mapping[str, Any]:
    text = f"{', '.join(names)} (default: {default or 'the model chooses'})"
    return {"default": default, "metavar": "NAME", "help": text}


def _another(option: str, value: str) -> Mapping[str, Any]:
    """Another spelling of an option with a value."""
    dest, text = option.removeprefix("--"), f"the same as {option} {value}"
    return {"action": "store_const", "const": value, "dest": dest, "default": argparse.SUPPRESS, "help": text}


_STEP: Options = {
    "--mode": _choice(MODES, "train"),
    "--precision": _choice(PRECISION_NAMES, "fp32"),
    "--bf16": _another("--precision", "bf16-mixed"),
    "--fp16": _another("--precision", "16-mixed"),
    "--optimizer": _choice(OPTIMIZER_NAMES, "adamw"),
    "--optimizer-in-backward": {"action": "store_true", "help": "step each parameter as its gradient is made"},
    "--lora": {"metavar": "RANK", "help": "train adapters of this rank, and freeze the model (peft's LoRA)"},
    "--lora-targets": {
        "metavar": "NAMES",
        "help": "layers with adapters: q_proj,v_proj or all-linear (default: peft's)",
    },
    "--quantization": {
        "metavar": "NAME",
        "help": f"{', '.join(QUANTIZATION_NAMES)}: hold the frozen weights as bitsandbytes does",
    },
    "--load-in-4bit": _another("--quantization", "nf4"),
    "--load-in-8bit": _another("--quantization", "int8"),
    "--attention": _choice(ATTENTION_NAMES, None),
    "--loss": _choice(LOSS_NAMES, "default"),
    "--packed": {"action": "store_true", "help": "pack the samples into one row, and answer in tokens per step"},
    "--gradient-checkpointing": {
        "nargs": "?",
        "const": True,
        "default": False,
        "metavar": "HOW",
        "help": "recompute activations in the backward: full (the default), every-2 (layers), every-4, or selective, "
        "which keeps what matrix products and attention return",
    },
    "--compile": {
        "nargs": "?",
        "const": COMPILED_PARTS[0],
        "metavar": "WHAT",
        "help": f"compile with torch.compile: {' or '.join(COMPILED_PARTS)} (default of --compile: model)",
    },
    "--strategy": {"metavar": "NAME", "help": f"{', '.join(STRATEGIES)}: how several GPUs train together, simulated"},
    "--num-gpus --gpus": {
        "dest": "gpus",
        "metavar": "N",
        "help": "how many train together, each with a batch of its own (default: the instance's, or 1); a sweep takes "
        "several numbers, as 8,64,512",
    },
    "--tensor-parallel": {
        "metavar": "N",
        "help": f"over how many GPUs fsdp2-tp splits layers (default: {GPUS_PER_NODE}, those of a node)",
    },
    "--context-parallel": {
        "metavar": "N",
        "help": f"over how many GPUs fsdp2-cp splits sequences (default: {GPUS_PER_NODE})",
    },
}
_OFFLINE: Options = {
    "--offline": {
        "action": "store_true",
        "help": "do not ask the Hugging Face Hub for the config.json of a model: the local cache alone",
    }
}
_JSON: Options = {"--json": {"action": "store_true", "help": "print JSON instead of a table"}}
_MARKDOWN: Options = {"--markdown": {"metavar": "FILE", "help": "also write the tables as Markdown"}}
# Appended so that a second one can be refused rather than win.
_ONE_GPU: Mapping[str, Any] = {
    "action": "append",
    "metavar": "NAME",
    "help": "default: this machine's, or a T4, unless an instance or a budget is given",
}
_ONE_INSTANCE: Mapping[str, Any] = {
    "action": "append",
    "metavar": "NAME",
    "help": "a cloud instance's GPUs, such as p4d.24xlarge",
}
_CONTEXT: Options = {
    "--context": {
        "metavar": "SIZE",
        "help": "what the CUDA context takes of a GPU with a name, such as 1.3GiB (default: the catalogue's, of "
        "today's CUDA, which loads kernels as they are used; it was 1 GiB and more before CUDA 11.7)",
    }
}
_PRICES: Options = {
    "--prices": {
        "metavar": "FILE",
        "help": "what instances cost, instead of the prices that come with batchfinder: CSV or TOML with instance and "
        "usd_per_hour",
    }
}
_PLOT: Options = {
    "--plot": {"metavar": "FILE", "help": "also draw the results: a .png or .svg (needs matplotlib)"},
    "--explain": {"action": "store_true", "help": "list what the figures assume and leave out"},
}
_HTML: Options = {"--html": {"metavar": "FILE", "help": "also write a page to look at in a browser, in one file"}}
_EXACT: Options = {
    "--exact": {
        "action": "store_true",
        "help": "meet --target-batch-size exactly, with smaller micro-batches where it takes them",
    }
}
_CACHE: Options = {"--cache": {"metavar": "URL", "help": "which cache (default: BATCHFINDER_CACHE or the user's)"}}

_FROM: Options = {
    "--from": {
        "dest": "from_file",
        "metavar": "FILE",
        "help": "a config file of axolotl, LLaMA-Factory, TRL, the Trainer, accelerate, torchtune, torchtitan, "
        "LightningCLI or DeepSpeed: what it says holds where no option is typed; none takes an option back",
    }
}
_WRITE: Options = {
    "--write": {
        "action": "store_true",
        "help": "with --from: write the micro-batch size and the accumulation into that file",
    }
}

_RECORDER: Options = {
    "--recorder": {
        "metavar": "NAME",
        "default": "auto",
        "help": f"what takes the step: {FAKE_DEVICE}, or {CUDA_BUILD}, PyTorch's own CUDA code without a GPU "
        f"(`batchfinder stub install` brings it), or {CUDA_BUILD}==2.6.0 for that version's; by default {CUDA_BUILD} "
        "where it is here, for up to four GPUs (another number of one counts as another), or what BATCHFINDER_RECORDER "
        "names",
    }
}
SWEEP = Command(
    "print the largest batch size for each model, GPU and sequence length",
    {
        "what is swept": {
            **_SEVERAL_NAMED,
            **_FROM,
            "--model": {
                "action": "append",
                "metavar": _MODEL,
                "help": "a named model, one on the Hugging Face Hub, a config.json or its folder, or your own factory; "
                "repeatable (default: two BERTs)",
            },
            "--seq-len": {
                "action": "append",
                "metavar": "N[,N]",
                "help": "tokens, or pixels for images; repeatable",
            },
            "--device": {
                "default": "auto",
                "metavar": "NAME",
                "help": "cuda, cuda:1 or cpu: measure with real training steps; cuda with a --gpu: try sizes on "
                "PyTorch's CUDA build without a GPU, as that card; simulated: no real steps; auto (default): measure "
                "on this machine's GPU, or simulate where it has none or --gpu or --instance is given",
            },
            "--gpu": {
                "action": "append",
                "metavar": "NAME[,NAME]",
                "help": "a GPU to simulate, 24GB+ for all of at least that size, or all; repeatable (default: this "
                "machine's, or a Titan X)",
            },
            "--instance": {
                "action": "append",
                "metavar": "NAME[,NAME]",
                "help": "simulate a cloud instance's GPUs, such as p4d.24xlarge; repeatable",
            },
            "--budget": {"metavar": "SIZE", "help": "use at most this much of a GPU, or of the RAM, such as 12GiB"},
            **_CONTEXT,
            **_PRICES,
            "--mfu": {
                "metavar": "SHARE",
                "help": "the share of the GPUs' peak FLOP/s that your training reaches, such as 0.4 or 40%%: say what "
                "a million tokens cost on instances with a price; simulated only",
            },
            **_OFFLINE,
        },
        "the step": {**_STEP, **_RECORDER},
        "the search": {
            "--find": {
                "default": "batch-size",
                "metavar": "WHAT",
                "help": "batch-size (default), or seq-len: the longest sequence at --batch-size, simulated",
            },
            "--batch-size": {
                "action": "append",
                "metavar": "N",
                "help": "with --find seq-len: samples in a micro-batch; repeatable (default: 1)",
            },
            "--target-batch-size": {
                "metavar": "N",
                "help": "add micro-batch x accumulation for this effective batch size",
            },
            **_EXACT,
            "--min-batch-size": {
                "metavar": "N",
                "default": "1",
                "help": "try no smaller batch size than this, such as 2 for BatchNorm (default: 1)",
            },
            "--max-batch-size": {"metavar": "N", "help": "try no larger batch size than this"},
            "--multiple-of": {
                "metavar": "N",
                "help": "try multiples of this only (default: 1; of lengths: 128)",
            },
            "--throughput": {
                "action": "store_true",
                "help": "also time sizes up to the largest, and print the smallest at full speed; measured only",
            },
            "--tolerance": {
                "metavar": "SHARE",
                "default": "0.01",
                "help": "how far below the largest a measured result may be; 0 for exact, as simulated ones are "
                "(default: 0.01)",
            },
            "--headroom": {
                "metavar": "SHARE|SIZE",
                "default": "0",
                "help": "keep this much free: 0.1, 10%% or 1GiB",
            },
            "--cache": {
                "metavar": "URL",
                "help": "where to keep results (default: BATCHFINDER_CACHE or the user's)",
            },
            "--no-cache": {"action": "store_true", "help": "neither look up results nor keep them"},
            "--no-certify": {"action": "store_true", "help": "use cached measured results without trying them once"},
        },
        "where it runs": {
            "--engine": {
                "default": "here",
                "metavar": "NAME",
                "help": "here (default), or ray: on the machines of a Ray cluster, with one --cache for all",
            },
            "--address": {
                "metavar": "ADDRESS",
                "help": "the Ray cluster's (default: RAY_ADDRESS, or the one that this machine is part of)",
            },
        },
        "the output": {
            **_JSON,
            **_MARKDOWN,
            **_HTML,
            **_WRITE,
            "--csv": {"metavar": "FILE", "help": "also write all figures as CSV"},
            **_PLOT,
            "--batch-sizes": {
                "metavar": "FILE",
                "help": 'also write the batch size for each length, for samplers: {"64": 266}',
            },
            "--lhotse": {"metavar": "FILE", "help": "also write the same with the names of lhotse and NeMo"},
        },
    },
)
ESTIMATE = Command(
    "print what one size takes memory for, and what would make it fit",
    {
        "what is estimated": {
            **_ONE_SIZE,
            **_FROM,
            "--gpu": _ONE_GPU,
            "--instance": _ONE_INSTANCE,
            "--budget": {"metavar": "SIZE", "help": "use at most this much of a GPU, such as 12GiB"},
            **_CONTEXT,
            **_OFFLINE,
        },
        "the step": {**_STEP, **_RECORDER},
        "the output": {
            "--by": {"metavar": "WHAT", "help": "module: add the memory of each module of the model"},
            "--advice": {"action": "store_true", "help": "add what other options would change, also where it fits"},
            **_JSON,
            **_MARKDOWN,
            **_HTML,
            **_PLOT,
        },
    },
)
PROFILE = Command(
    "print the memory of one training step, stage by stage",
    {
        "what is profiled": {
            **_ONE_SIZE,
            **_FROM,
            "--seq-len": {
                "metavar": "N[,N]",
                "help": "tokens, or pixels for images (default: 128 or 224); 96,128: of one step after the other",
            },
            "--gpu": _ONE_GPU,
            "--instance": _ONE_INSTANCE,
            "--budget": {"metavar": "SIZE", "help": "use at most this much of the GPU, such as 12GiB"},
            **_CONTEXT,
            **_OFFLINE,
        },
        "the step": {**_STEP, **_RECORDER},
        "the output": {
            **_JSON,
            **_HTML,
            **_PLOT,
            "--snapshot": {"metavar": "FILE", "help": "also write all events: a .pickle for pytorch.org/memory_viz"},
        },
    },
)
PLAN = Command(
    "print the options under which a target batch trains on a GPU that change least, and what each costs and saves",
    {
        "what is planned": {
            **_NAMED,
            **_FROM,
            "--model": {"default": "bert-base", "metavar": _MODEL, "help": "default: bert-base"},
            "--seq-len": {"metavar": "N", "help": "tokens, or pixels for images (default: 128 or 224)"},
            "--target-batch-size": {"metavar": "N", "help": "samples per optimizer step, on all GPUs together"},
            **_EXACT,
            "--min-micro-batch": {
                "metavar": "N",
                "default": "1",
                "help": "take no plan with a smaller micro-batch than this (default: 1)",
            },
            "--gpu": _ONE_GPU,
            "--instance": {**_ONE_INSTANCE, "help": "a cloud instance's GPUs, each with a copy of the model"},
            "--budget": {"metavar": "SIZE", "help": "use at most this much of a GPU, such as 12GiB"},
            **_CONTEXT,
            **_OFFLINE,
            "--keep": {
                "action": "append",
                "metavar": "NAME",
                "help": "leave this as it is: precision, optimizer, loss or checkpointing; repeatable",
            },
            "--allow": {
                "action": "append",
                "metavar": "NAME",
                "help": "lora or qlora: train adapters as a runner-up too, not only where nothing else trains",
            },
        },
        "the step to start from": {**_STEP, **_RECORDER},
        "the output": {**_JSON, **_MARKDOWN, **_HTML, **_WRITE, "--explain": _PLOT["--explain"]},
    },
)
CHECK = Command(
    "take training steps on this machine's GPU, and print their peaks beside the simulated ones",
    {
        "what is checked": {
            **_ONE_SIZE,
            **_SEVERAL_NAMED,
            "--model": {
                "action": "append",
                "metavar": _MODEL,
                "help": "repeatable (default: bert-base, gpt2 and resnet50)",
            },
            "--device": {"default": "cuda", "metavar": "NAME", "help": "cuda (default) or cuda:1"},
            **_OFFLINE,
        },
        "the step": {**_STEP, **_RECORDER},
        "the output": {
            **_JSON,
            "--out": {"metavar": "FILE", "help": "also write the same JSON, with the GPU, driver and versions"},
            "--explain": _PLOT["--explain"],
        },
    },
)
REPRODUCE = Command(
    "print published tables beside the same figures, found here",
    {
        "": {
            "table": {
                "nargs": "?",
                "default": "all",
                "metavar": "TABLE",
                "help": f"{', '.join(REPRODUCTIONS)} or all (default: all)",
            },
            "--measured": {
                "action": "store_true",
                "help": "also run the cells with real steps, on a GPU here with enough memory",
            },
        },
        "the output": {**_JSON, **_MARKDOWN},
    },
)
CACHE = Command(
    "list, show, clear, export or import cached results",
    {},
    {
        "list": Command("list all results, one per line", {"": {**_CACHE, **_JSON}}),
        "show": Command(
            "show one result, with everything it depends on and every size tried",
            {
                "": {
                    "record": {"metavar": "RECORD", "help": "the first digits of its name in the list"},
                    **_CACHE,
                    **_JSON,
                }
            },
        ),
        "clear": Command(
            "remove all results, or only those that are named",
            {
                "": {
                    "record": {"nargs": "*", "metavar": "RECORD", "help": "the first digits of a name in the list"},
                    "--yes": {
                        "action": "store_true",
                        "help": "remove all without asking, as it does on a terminal",
                    },
                    **_CACHE,
                }
            },
        ),
        "export": Command(
            "write all results to one file, for another machine",
            {"": {"file": {"metavar": "FILE", "help": "the file to write; - for stdout"}, **_CACHE}},
        ),
        "import": Command(
            "add the results of an exported file; of two for the same key the newer one is kept",
            {"": {"file": {"metavar": "FILE", "help": "the file to read; - for stdin"}, **_CACHE}},
        ),
    },
)
PAGE = Command(
    "write one HTML page of all cached results",
    {"": {"file": {"metavar": "FILE", "help": "the file to write, which ends in .html"}, **_CACHE, **_JSON}},
)
_ON_STUB: Options = {
    "--gpu": {
        "action": "append",
        "metavar": "NAME",
        "help": "a GPU to stand in for; repeatable, one for each card (default: an A100 80GB)",
    },
    "--memory": {"metavar": "SIZE", "help": "memory of each card, all of it for PyTorch, such as 16GiB"},
    "--count": {"default": "1", "metavar": "N", "help": "how many cards of each kind (default: 1)"},
    "--held": {"metavar": "SIZE", "help": "what something else holds of each card"},
    "--events": {
        "default": "early",
        "metavar": "WHEN",
        "help": "when work on other streams is done: early (at once, the default), late (when the host waits for it), "
        "in-order (when it waits for anything issued later), or both, which runs the command early and late and tells "
        "the range of what is reserved",
    },
    "--addresses": {
        "default": "cuda",
        "metavar": "RULE",
        "help": "where segments lie: cuda (as memory snapshots show, the default), low, rising or falling",
    },
    "--values": {
        "default": "small",
        "metavar": "WHICH",
        "help": "what is computed, on the CPU: small tensors (the default), all (slow; losses are then exact) or none",
    },
    "--torch": {"metavar": "VERSION", "help": "another version of PyTorch than this environment's"},
}
_ALONE: Options = {
    "--num-gpus": {
        "metavar": "N",
        "help": "run the first rank of a training on so many GPUs alone: the script itself, without torchrun",
    },
    "--nodes": {"metavar": "N", "help": "with --num-gpus: machines that they are in (default: of 8 GPUs at most)"},
}
DRY_RUN = Command(
    "run a training command on a simulated GPU: does it fit, and what takes the memory",
    {
        "the cards": {
            **{name: _ON_STUB[name] for name in ("--gpu", "--memory", "--count", "--held", "--values", "--torch")},
            **_ALONE,
        },
        "when it ends": {
            "--steps": {
                "metavar": "N",
                "help": "after so many optimizer steps (default: when 5 have added nothing to the peak, or after 100)",
            },
            "--epochs": {"metavar": "N", "help": "after so many epochs, evaluation and checkpoint included"},
            "--seconds": {"metavar": "N", "help": "after so many seconds, whatever it does"},
        },
        "what it may do": {
            "--scratch": {
                "action": "store_true",
                "help": "run it in a temporary copy of this folder, which is thrown away",
            },
            "--once": {
                "action": "store_true",
                "help": "where it does not fit, do not run it once more, in a temporary copy, to see what it takes",
            },
            "--online": {"action": "store_true", "help": "let loggers (W&B, MLflow, Comet) and the Hub be reached"},
        },
        "the output": {
            **_JSON,
            "--explain": {
                "action": "store_true",
                "help": "list what is assumed and what was read and not known",
            },
            "--snapshot": {"metavar": "FILE", "help": "also write a .pickle for pytorch.org/memory_viz"},
            **_HTML,
        },
        "": {"argv": {"nargs": "...", "metavar": "COMMAND", "help": "what to run, after --"}},
    },
)
FIND = Command(
    "find the largest batch size of a training command on simulated GPUs, by running it",
    {
        "where it runs": {
            "--gpu": {
                "action": "append",
                "metavar": "NAME",
                "help": "a GPU to find it for; repeatable, each on its own (default: an A100 80GB)",
            },
            "--device": {
                "default": "simulated",
                "metavar": "DEVICE",
                "help": "cuda for the GPU that is here: real steps, each run ended once memory is steady (default: "
                "simulated)",
            },
            **{name: _ON_STUB[name] for name in ("--memory", "--held", "--torch")},
            "--count": {"default": "1", "metavar": "N", "help": "GPUs that train side by side (default: 1)"},
            **_ALONE,
        },
        "what is filled in": {
            "--env -e": {
                "action": "append",
                "default": [],
                "metavar": "NAME=VALUE",
                "help": "an environment variable, such as BS={batch_size}",
            },
            "--in": {
                "action": "append",
                "default": [],
                "dest": "config",
                "metavar": "FILE:KEY",
                "help": "a number in a config file (yaml, json, toml), such as cfg.yaml:micro_batch_size, or "
                "cfg.yaml:grad_accum={accumulation}",
            },
            "--seq-len": {"metavar": "N[,N]", "help": "lengths, for {seq_len}: a row for each"},
            "--target-batch-size": {"metavar": "N", "help": "samples per optimizer step, for {accumulation}"},
        },
        "the search": {
            "--steps": {"metavar": "N", "help": "optimizer steps of a run (default: until memory is steady)"},
            "--epochs": {"metavar": "N", "help": "epochs of a run, evaluation and checkpoint included"},
            "--max-batch-size": {"metavar": "N", "help": "the largest to try"},
            "--tolerance": {
                "default": "1%",
                "metavar": "SHARE",
                "help": "how far above the answer a size may be that does not fit; 0 for the exact maximum (default: "
                "1%%, exact below 100)",
            },
            "--here": {
                "action": "store_true",
                "help": "run it in this folder, where what it writes stays (default: in temporary copies)",
            },
            "--again": {
                "action": "store_true",
                "help": "run all sizes anew (default: a run that nothing has changed for since is not done again)",
            },
            "--jobs": {"metavar": "N", "help": "runs at once (default: one for each core; 1 with --count above 1)"},
            "--online": DRY_RUN.groups["what it may do"]["--online"],
        },
        "the output": {**_JSON, "--explain": DRY_RUN.groups["the output"]["--explain"]},
        "": {"argv": {"nargs": "...", "metavar": "COMMAND", "help": "what to run, after --, with {batch_size} in it"}},
    },
)
STUB = Command(
    "run PyTorch's own CUDA build without a GPU",
    {},
    {
        "install": Command(
            "download the CUDA build of the PyTorch that is installed, into the user's cache",
            {
                "": {
                    "--torch": {"metavar": "VERSION", "help": "another version, such as 2.6.0"},
                    "--minimal": {"action": "store_true", "help": "PyTorch alone, without cuDNN, nvrtc and Triton"},
                    "--uninstall": {"action": "store_true", "help": "remove all that was downloaded and compiled"},
                }
            },
        ),
        "status": Command("say which builds are here, and whether one runs", {"": _JSON}),
        "run": Command(
            "run a command with simulated cards, such as: batchfinder stub run --gpu t4 -- python train.py",
            {
                "the cards": _ON_STUB,
                "": {"argv": {"nargs": "...", "metavar": "COMMAND", "help": "what to run, after --"}},
            },
        ),
    },
)
GPUS = Command(
    "list the GPUs that can be named, with what each has",
    {
        "": {
            "--min": {"metavar": "SIZE", "help": "those of at least this size, such as 24GB"},
            "--has": {"action": "append", "default": [], "metavar": "TYPE", "help": "bf16 or fp8; repeatable"},
            **_JSON,
        }
    },
)
INSTANCES = Command(
    "list the cloud instances that can be named, the cheapest first",
    {
        "": {
            "--gpu": {"metavar": "NAME", "help": "those with this GPU"},
            "--min": {"metavar": "SIZE", "help": "those whose GPUs are of at least this size, such as 24GB"},
            **_PRICES,
            **_JSON,
        }
    },
)
COMMANDS = {
    "sweep": SWEEP,
    "estimate": ESTIMATE,
    "profile": PROFILE,
    "plan": PLAN,
    "dry-run": DRY_RUN,
    "find": FIND,
    "check": CHECK,
    "reproduce": REPRODUCE,
    "cache": CACHE,
    "stub": STUB,
    "gpus": GPUS,
    "instances": INSTANCES,
    "page": PAGE,
}


class _Version(argparse.Action):
    """Says which versions answer: batchfinder's, and those of what it records steps with."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        found = installed("torch", "pytorch-lightning", "transformers")
        print("\n".join(f"{name} {version}" for name, version in found.items()))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Names the command nearest to a wrong one."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        super().error(message)


def nearest(word: str, known: Iterable[str]) -> str:
    """A question for the known words that are most like one that is not known; empty where none is."""
    from difflib import get_close_matches

    matches = get_close_matches(word.partition("=")[0], list(known), n=2)
    return f". Did you mean {' or '.join(matches)}?" if matches else ""


def options_of(arguments: argparse.Namespace) -> list[str]:
    """The options of the command that was typed, in every spelling."""
    command = COMMANDS[arguments.command]
    if command.commands is not None:
        command = command.commands[getattr(arguments, f"{arguments.command}_command")]
    return [word for options in command.groups.values() for option in options for word in option.split()]


def build_parser(typed_only: bool = False) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        typed_only: leave out what was not typed, rather than give its default.
    """
    parser = _Parser(
        prog="batchfinder", description="Find the largest batch size that trains, with or without a GPU at hand."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="say which versions are installed")

    def add(parser: argparse.ArgumentParser, commands: Mapping[str, Command], dest: str) -> None:
        added = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND")
        for name, command in commands.items():
            summary = command.summary
            one = added.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
            for title, options in command.groups.items():
                group = one.add_argument_group(title) if title else one
                for option, settings in options.items():
                    unless_typed = {"default": argparse.SUPPRESS} if typed_only else {}
                    group.add_argument(*option.split(), **{**settings, **unless_typed})
            if command.commands is not None:
                add(one, command.commands, f"{name}_{dest}")

    add(parser, COMMANDS, "command")
    return parser
