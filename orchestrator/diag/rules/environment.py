"""Python packages: absent, not fitting one another, not as they were frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import target_of
from orchestrator.diag.text import Line
from orchestrator.diag.tracebacks import Failure

VERSION = (
    r"undefined symbol: \S+",
    r"version `(?:GLIBC|GLIBCXX|CXXABI|CUDA)[_\d.]*' not found",
    r"PyTorch and torch(?:vision|audio) were compiled with different CUDA",
    r"operator torchvision::nms does not exist",
    r"compiled using NumPy 1\.x cannot be run in|numpy\.(?:dtype|ufunc) size changed|"
    r"_ARRAY_API not found|numpy\.core\.multiarray failed to import",
    r"\S+[<>=!~]=?[\d.]+\S* is required for a normal functioning of this module,? but found",
    r"ImportError: \S+[<>=!]=?[\d.]\S* is required",
    r"requires? (?:the )?\S+ ?(?:>=|==|<=|~=|<|>) ?[\d.]+\S*,? but (?:you have|found|got|it is|"
    r"installed)",
    r"VersionConflict|ContextualVersionConflict|DistributionNotFound",
    r"Torch not compiled with CUDA enabled|Distributed package doesn't have \S+ built[- ]in",
    r"Transformers does not recognize this architecture",
    r"KeyError: '(?:qwen|llama|mistral|gemma|deepseek|phi|glm)\w*'",
    r"data did not match any variant of untagged enum",
    r"(?:needs|requires|supports only|is only supported (?:on|with)) (?:torch|triton|"
    r"transformers|Python|CUDA|NCCL)"
    r" ?(?:>=|==|<|>|version|at least)? ?\d[\d.]*[^\n]*(?:but|found|have|got|is)",
    r"Incompatible (?:version|torch|CUDA)|(?<!library )version mismatch: |"
    r"incompatible with the installed",
    r"has (?:been )?(?:detected|found) (?:an )?incompatible|_STATUS_\w*VERSION_MISMATCH\b",
    r"requires a different Python|python_requires|Python 3\.\d+ (?:or (?:newer|later)|is required)",
    r"CUDA Setup failed despite GPU being available|Could not load bitsandbytes native library|"
    r"Could not find the bitsandbytes CUDA binary",
    r"magic number in .*\.pyc|bad magic number",
    r"Failed to import \S+ because of the following error",  # transformers
    r"Dataset scripts are no longer supported",  # datasets 4
    r"cuDNN version incompatibility|CUDAMismatchException|CUDA VERSION MISMATCH|"
    r"The detected CUDA version \(\S+\) mismatches",
    r"use_libuv was requested but PyTorch was buil[td] without",
    r"cannot import name '\w+' from '(?:torch|transformers|triton|huggingface_hub|tokenizers|"
    r"datasets|accelerate"
    r"|numpy|safetensors|peft|trl|flash_attn|pydantic\w*|typing_extensions|collections|typing)",
    r"module '(?:torch|transformers|triton|numpy|datasets|accelerate|tokenizers|"
    r"huggingface_hub|np|pydantic)"
    r"[\w.]*' has no attribute",
)


def missing_module(e: Evidence) -> Iterator[Finding]:
    """``ModuleNotFoundError: No module named 'x'`` (first party files excepted), a shared
    library that cannot be opened. The same words in an optional import that was caught are
    nothing."""
    failures = [
        f
        for f in e.errors
        if f.name == "ModuleNotFoundError"
        or (f.name in ("ImportError", "OSError") and "cannot open shared object" in f.message)
    ]
    # An extension that its own build did not leave is the compiler's.
    others = r"libcuda\.so|libnvidia-ml|/torch_extensions/"
    failures = [f for f in failures if not re.search(others, f.message)]
    hits: list[Failure | Hit] = [f for f in failures if not f.inner or f.root is f]
    hits += [
        h
        for h in e.search(
            r"^(?:/\S+/)?python[\d.]*: No module named (\S+)",
            r"^ImportError: [^\n]*requires the (\S+) (?:library|package)",
            r"ImportError: [^\n]*\brequires (\S+): `pip install",
            r"the package (\S+) seems to be not installed",
            r"(Ninja) is required to load C\+\+ extensions",
            r"failed to open (lib[\w.+-]+\.so[\w.]*)",  # nvrtc and its built-in functions
            r"only (python3-minimal) is there|Python has no standard library",
            # The start script that `dflashctl init` writes.
            r"^no (trainer) here; this brings it along:",
        )
    ]
    if not hits:
        return
    module = _module_in(hits[0])
    if module == "trainer":
        # Ours; a package of that name on an index is somebody else's.
        yield e.found(
            "env.import",
            "the trainer is not in the container: it travels with --config",
            hits[:3],
            "dflashctl launch --config train.yaml   # pushes the trainer, too\n"
            "a program of your own: put it into start_training.sh, or launch -- COMMAND",
        )
        return
    frozen = e.probes.named(r"env_?(?:diff|drift)|frozen")
    yield e.found(
        "env.import",
        f"{module or 'a module'} is not installed in the interpreter that ran",
        hits[:3],
        f"dflashctl env diff GOOD.json {target_of(e)}; dflashctl env sync {target_of(e)} "
        "--lock GOOD.json\n"
        f"or by hand: {_python(e)} -m pip install "
        f"{module.split('.')[0].replace('_', '-') or 'NAME'}\n"
        f"is it the right interpreter? {_python(e)} -c 'import sys; print(sys.prefix, sys.path)'"
        + _another(e),
        confidence=0.9 if not frozen else 0.85,
    )


def _module_in(place: Failure | Hit) -> str:
    """The module, library or package that is named as absent; empty if none is."""
    text = place.text if isinstance(place, Failure) else place.line.text
    if text.startswith("no trainer here"):
        return "trainer"
    name = re.search(
        r"No module named '?([\w.-]+)'?|^(\S+): cannot open shared|(lib\S+\.so[\d.]*)|"
        r"the (\S+) lib|(Ninja) is required|the package (\S+) seems|requires (\S+): `pip",
        text.split(": ", 1)[-1],
    )
    return next((g for g in name.groups() if g), "") if name else ""


def _python(e: Evidence) -> str:
    for f in e.failures:
        for frame in f.frames:
            match = re.match(r"(/\S+)/lib/python[\d.]+/site-packages", frame.file)
            if match is not None:
                return f"{match[1]}/bin/python"
    for hit in e.search(r"of binary: (\S+)"):
        return hit[1]
    return e.python or "python"


def _another(e: Evidence) -> str:
    """That it was not the inventory's interpreter, where the frames name another."""
    ran = _python(e)
    if not e.python.startswith("/") or ran == e.python:
        return ""
    return f"\nit was {ran}; the inventory names {e.python}: launch -- python … takes that one"


_RENAMED = re.compile(
    r"unexpected keyword argument '(?:dtype|torch_dtype|eval_strategy|evaluation_strategy|"
    r"processing_class|num_items_in_batch|use_auth_token|logits_to_keep|num_logits_to_keep|"
    r"past_key_values?|cache_position|max_seq_length|attn_implementation|tokenizer|"
    r"dataset_text_field)'"
)
_CONSTRUCTED = re.compile(r"^[A-Z]\w*\.__init__\(\) got an unexpected keyword argument ")
_TRAINERS = re.compile(r"^\w*(?:TrainingArguments|Trainer|(?:SFT|DPO|GRPO)Config)\.__init__\(\)")


def _renamed(f: Failure) -> bool:
    """An argument that transformers or trl had under another name or not at all: ``dtype`` was
    ``torch_dtype`` before 4.56, ``eval_strategy`` ``evaluation_strategy`` before 4.41,
    ``num_items_in_batch`` came with 4.46. In a function of one's own it is a plain mistake."""
    inside = bool(f.frames) and f.frames[-1].library
    if inside and _CONSTRUCTED.match(f.message) and "**" not in f.frames[-1].code:
        return True  # a library's own words, none that it passes on for the user
    return _RENAMED.search(f.message) is not None and (
        inside or _TRAINERS.match(f.message) is not None
    )


def versions(e: Evidence) -> Iterator[Finding]:
    """Things that are installed and do not fit together: the linker's ``undefined symbol`` and
    ``version `GLIBC_2.38' not found``, NumPy 1 against 2, transformers' own version checks, an
    unknown model type, ``cannot import name`` from a library. ``pip check`` says which."""
    hits = e.unrecovered(*VERSION)
    hits = [h for h in hits if not re.search(r"UserWarning|FutureWarning|Deprecat", h.line.text)]
    inner = [
        f
        for f in e.errors
        if f.name in ("ImportError", "AttributeError", "TypeError")
        and re.search(
            r"cannot import name|has no attribute|unexpected keyword argument|partially init",
            f.message,
        )
        and _in_library(f)
        and not e.recovered(f.line)
        and f.name != "TypeError"
    ] + [f for f in e.raised("TypeError") if _renamed(f) and not e.recovered(f.line)]
    own = [f for f in inner if "cannot import name" in f.message and _own_module(f)]
    inner = [f for f in inner if f not in own]
    if not hits and not inner:
        return
    check = e.probes.search(r"\bhas requirement\b|requires .* but you have|which is not installed")
    lists = [
        li
        for li, _ in e.probes.search(
            r"^\s*[+-]?\s?(?:torch|nvidia-nccl\S*|transformers|triton|numpy|tokenizers)\b.*\d"
        )
    ]
    what = (hits[0].line.text if hits else inner[0].text).strip()
    yield e.found(
        "env.version",
        "installed versions do not work together: " + what[:140],
        [*hits[:3], *inner[:2], *(li for li, _ in check[:2]), *lists[:2]],
        f"{_python(e)} -m pip check; dflashctl env diff GOOD.json {target_of(e)}\n"
        f"dflashctl env sync {target_of(e)} --lock GOOD.json   # back to the frozen environment\n"
        "several nvidia-nccl or torch builds at once: uninstall all of them, then install one "
        "torch",
        confidence=0.88,
    )


def _in_library(failure: Failure) -> bool:
    """What raised it lies in a library: not the ``__getattr__`` of a module or a config that the
    user's own code asked for something."""
    asked = [fr for fr in failure.frames if not re.match(r"__getattr(?:ibute)?__$", fr.function)]
    return bool(asked) and asked[-1].library


def _own_module(failure: Failure) -> bool:
    """``cannot import name 'x' from 'mine' (/workspace/mine.py)``: the user's own file."""
    match = re.search(r"\((/[^)]+)\)", failure.message)
    return match is not None and "site-packages" not in match[1] and "/lib/python" not in match[1]


def drift(e: Evidence) -> Iterator[Finding]:
    """The environment differs from the frozen one, and the failure is of the kind that this
    makes: a library that calls another in an old or new way. A difference beside an unrelated
    failure, or on a healthy run, is no finding."""
    changed = _differences(e)
    if not changed or e.outcome.state in ("finished", "running"):
        return
    names = {
        m[1].lower().replace("_", "-")
        for li in changed
        if (m := re.match(r"\s*[-+~!<>]?\s*([A-Za-z][\w.-]*)", li.text)) is not None
    }
    blamed = [
        f
        for f in e.errors
        if not f.inner
        and not e.recovered(f.line)
        and (
            _names_package(f, names)
            or f.name in ("ImportError", "AttributeError", "ModuleNotFoundError")
        )
    ]
    # No word at all, not even of an end, fits a library that fails before the program speaks.
    wordless = e.outcome.state == "unknown" and not (e.errors or e.outcome.ended or e.series)
    if not blamed and not wordless:
        return
    yield e.found(
        "env.drift",
        "the environment is not the frozen one: "
        + ", ".join(sorted({li.text.strip() for li in changed})[:4])[:160],
        [*changed[:4], *blamed[:2]],
        f"dflashctl env diff GOOD.json {target_of(e)}\n"
        f"dflashctl env sync {target_of(e)} --lock GOOD.json   # back to the lock file\n"
        f"or accept it after a test: dflashctl env freeze {target_of(e)} -o GOOD.json",
        confidence=0.92,
    )


def _differences(e: Evidence) -> list[Line]:
    """Lines that tell of a package that is not as it was frozen."""
    probes = [
        p
        for p in e.probes
        if re.search(r"env_?(?:diff|drift)|freeze|lock_?diff", p.key)
        or re.search(r"frozen .* vs|drift|differs? from (?:the )?(?:frozen|lock)", p.text)
    ]
    row = re.compile(r"\s*[-+~!<>] ?[\w.-]+ ?(?:==|@|->| )|.*(?:->|→|=>).*\d")
    said = e.search(
        r"environment (?:differs|drifted|has changed)|(?:differs|"
        r"drift(?:ed)?) from (?:the )?(?:frozen|lock)",
        probes=False,
    )
    rows = [li for probe in probes for li in probe.lines if row.match(li.text)]
    return rows + [h.line for h in said]


_MODEL_CLASS = re.compile(
    r"(?:Auto|PreTrained|Qwen|Llama|Mistral|Mixtral|Gemma|Deepseek|Phi|Glm|GPT)\w*"
    r"(?:Model|LM|Config|Tokenizer\w*|Attention|Layer)$"
)


def _names_package(failure: Failure, names: set[str]) -> bool:
    files = " ".join(fr.file for link in failure.chain() for fr in link.frames)
    packages = {
        p.lower().replace("_", "-")
        for p in re.findall(r"(?:site|dist)-packages/([\w.-]+?)/", files)
    }
    code_error = failure.name in (
        "TypeError",
        "AttributeError",
        "ImportError",
        "KeyError",
        "RuntimeError",
        "ValueError",
        "NotImplementedError",
        "ModuleNotFoundError",
    )
    # Python refuses a call's arguments before the callee has a frame: its class must tell.
    signature = re.match(r"(\w+)\.\w+\(\) (?:got an? |takes |missing )", failure.message)
    if signature is not None and _MODEL_CLASS.match(signature[1]):
        packages.add("transformers")
    return code_error and bool(packages & names)


RULES = (missing_module, versions, drift)
