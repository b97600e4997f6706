"""Python packages and the shell's surroundings: modules, versions, drift, PATH."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import container_of, target_of
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
    r"Torch not compiled with CUDA enabled",
    r"Transformers does not recognize this architecture",
    r"KeyError: '(?:qwen|llama|mistral|gemma|deepseek|phi|glm)\w*'",
    r"data did not match any variant of untagged enum",
    r"(?:needs|requires|supports only|is only supported (?:on|with)) (?:torch|triton|"
    r"transformers|Python|CUDA|NCCL)"
    r" ?(?:>=|==|<|>|version|at least)? ?\d[\d.]*[^\n]*(?:but|found|have|got|is)",
    r"Incompatible (?:version|torch|CUDA)|version mismatch: |incompatible with the installed",
    r"has (?:been )?(?:detected|found) (?:an )?incompatible|_STATUS_\w*VERSION_MISMATCH\b",
    r"requires a different Python|python_requires|Python 3\.\d+ (?:or (?:newer|later)|is required)",
    r"magic number in .*\.pyc|bad magic number",
    r"cannot import name '\w+' from '(?:torch|transformers|triton|huggingface_hub|tokenizers|"
    r"datasets|accelerate"
    r"|numpy|safetensors|peft|trl|flash_attn|pydantic\w*|typing_extensions|collections|typing)",
    r"module '(?:torch|transformers|triton|numpy|datasets|accelerate|tokenizers|"
    r"huggingface_hub|np|pydantic)"
    r"[\w.]*' has no attribute",
)
PATH = (
    r"(?:^|: )(?:line \d+: )?([\w./+-]+): (?:command )?not found\b",
    r"(?:^|: )command not found: ([\w./+-]+)",
    # bash in de, fr, es, it, pt, nl, pl, ru, zh, ja
    r": ([\w./+-]+) ?: (?:Kommando nicht gefunden|Befehl nicht gefunden|commande introuvable|"
    r"orden no encontrada|comando non trovato|comando não encontrado|opdracht niet gevonden|"
    r"nie znaleziono polecenia|команда не найдена|未找到命令|コマンドが見つかりません)",
    r"exec: \"([^\"]+)\": executable file not found in \$PATH",
    # nohup, timeout, nice, env, stdbuf of coreutils; setsid and chrt of util-linux
    r"failed to (?:run command|execute) ['‘`]?([\w./+-]+)['’`]?: No such file or directory",
    r"/usr/bin/env: ['‘]?([\w./+-]+)['’]?: No such file or directory",
    r"FileNotFoundError: \[Errno 2\] No such file or directory: '((?:\w[\w+-]*)|"
    r"/usr/\S*bin/\S+)'\s*$",
    r'Failed to exec "([^"]+)"',
    r"(?:which: no|no) ([\w+-]+) in \(",
    r"(?:bash|sh): (?:line \d+: )?(/\S*bin/[\w.+-]+): No such file or directory",
    # Our own supervisor, of a program by its bare name.
    r"\bcannot start ['\"]([\w.+-]+)['\"] in [^\n]*: No such file or directory(?!; there is no)",
)
USUAL = (
    *("python3", "python", "torchrun", "accelerate", "deepspeed", "bash", "sh", "env", "uv"),
    *("conda", "nohup", "numactl", "nsys", "mpirun", "jupyter", "tensorboard"),
)
_TOOLS_ELSEWHERE = re.compile(r"^(?:tmux|pct|ssh|nvidia-smi)$|/tmux$|\.sh$|\.py$")


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
    failures = [f for f in failures if not re.search(r"libcuda\.so|libnvidia-ml", f.message)]
    hits: list[Failure | Hit] = [f for f in failures if not f.inner or f.root is f]
    hits += [
        h
        for h in e.search(
            r"^(?:/\S+/)?python[\d.]*: No module named (\S+)",
            r"^ImportError: [^\n]*requires the (\S+) (?:library|package)",
            r"failed to open (lib[\w.+-]+\.so[\w.]*)",  # nvrtc and its built-in functions
            r"only (python3-minimal) is there|Python has no standard library",
            # The start script that `dflashctl init` writes.
            r"^no (trainer) here; this brings it along:",
        )
    ]
    if not hits:
        return
    first = hits[0]
    text = first.text if isinstance(first, Failure) else first.line.text
    name = re.search(
        r"No module named '?([\w.-]+)'?|^(\S+): cannot open shared|(lib\S+\.so[\d.]*)|"
        r"the (\S+) lib",
        text.split(": ", 1)[-1],
    )
    module = next((g for g in name.groups() if g), "") if name else ""
    if module == "trainer" or text.startswith("no trainer here"):
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
    r"past_key_values?|cache_position|max_seq_length|attn_implementation)'"
)
_TRAINERS = re.compile(r"^\w*(?:TrainingArguments|Trainer|(?:SFT|DPO|GRPO)Config)\.__init__\(\)")


def _renamed(f: Failure) -> bool:
    """An argument that transformers or trl had under another name or not at all: ``dtype`` was
    ``torch_dtype`` before 4.56, ``eval_strategy`` ``evaluation_strategy`` before 4.41,
    ``num_items_in_batch`` came with 4.46. In a function of one's own it is a plain mistake."""
    inside = bool(f.frames) and f.frames[-1].library
    return _RENAMED.search(f.message) is not None and (
        inside or _TRAINERS.match(f.message) is not None
    )


def versions(e: Evidence) -> Iterator[Finding]:
    """Things that are installed and do not fit together: the linker's ``undefined symbol`` and
    ``version `GLIBC_2.38' not found``, NumPy 1 against 2, transformers' own version checks, an
    unknown model type, ``cannot import name`` from a library. ``pip check`` says which."""
    hits = [h for h in e.search(*VERSION) if not e.recovered(h.line)]
    hits = [h for h in hits if not re.search(r"UserWarning|FutureWarning|Deprecat", h.line.text)]
    inner = [
        f
        for f in e.errors
        if f.name in ("ImportError", "AttributeError", "TypeError")
        and re.search(
            r"cannot import name|has no attribute|unexpected keyword argument|partially init",
            f.message,
        )
        and f.frames
        and f.frames[-1].library
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


def _own_module(failure: Failure) -> bool:
    """``cannot import name 'x' from 'mine' (/workspace/mine.py)``: the user's own file."""
    match = re.search(r"\((/[^)]+)\)", failure.message)
    return match is not None and "site-packages" not in match[1] and "/lib/python" not in match[1]


def drift(e: Evidence) -> Iterator[Finding]:
    """The environment differs from the frozen one, and the failure is of the kind that this
    makes: a library that calls another in an old or new way. A difference beside an unrelated
    failure, or on a healthy run, is no finding."""
    probes = [
        p
        for p in e.probes
        if re.search(r"env_?(?:diff|drift)|freeze|lock_?diff", p.key)
        or re.search(r"frozen .* vs|drift|differs? from (?:the )?(?:frozen|lock)", p.text)
    ]
    changed: list[Line] = []
    for probe in probes:
        rows = [
            li
            for li in probe.lines
            if re.match(r"\s*[-+~!<>] ?[\w.-]+ ?(?:==|@|->| )|.*(?:->|→|=>).*\d", li.text)
        ]
        changed += rows
    changed += [
        h.line
        for h in e.search(
            r"environment (?:differs|drifted|has changed)|(?:differs|"
            r"drift(?:ed)?) from (?:the )?(?:frozen|lock)",
            probes=False,
        )
    ]
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
    slow = not e.errors and e.outcome.state != "failed"
    if not blamed and not (
        slow
        and e.outcome.ended is None
        and len(changed) > 0
        and e.outcome.state == "unknown"
        and not e.series
    ):
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


_NO_FIRST_LINE = (
    # bash 5.2 and later; before it, and zsh
    r": (/\S+/)([\w.+-]+): cannot execute: required file not found",
    r": (/\S+/)([\w.+-]+): /\S+: bad interpreter: No such file or directory",
)


def moved_environment(e: Evidence) -> Iterator[Finding]:
    """A program whose first line names an interpreter that is gone: ``torchrun`` and ``pip`` of a
    virtual environment that was moved or copied keep the old path."""
    hits = [h for h in e.search(*_NO_FIRST_LINE, probes=False) if not h[2].endswith(".sh")]
    if not hits or e.progress:
        return
    folder, name = hits[-1][1], hits[-1][2]
    module = {"torchrun": "torch.distributed.run"}.get(name, name.replace("-", "_"))
    yield e.found(
        "env.path",
        f"{folder}{name} names an interpreter that is not there: was its environment moved?",
        hits[-3:],
        f"in the container: head -1 {folder}{name}   # the interpreter that it asks for\n"
        f"{folder}python -m {module} …   # needs no first line\n"
        "or make the environment anew where it is to stay",
        confidence=0.9,
    )


def command_path(e: Evidence) -> Iterator[Finding]:
    """127 and the shells' ways to say it (``bash: line 1: torchrun: command not found``, dash's
    ``python: not found``, lxc-attach's ``Failed to exec "x"``). pct exec's PATH lacks
    /usr/local."""
    hits = [
        h
        for h in e.search(*PATH)
        if not _TOOLS_ELSEWHERE.search(h.match[h.match.lastindex or 0] or "")
    ]
    hits = [h for h in hits if not _ignored(e, h)]
    log = [h for h in hits if h.line.source == "log"]
    if not log and (tried := [h for h in hits if h.line.source in OWN_WAY]):
        yield _no_interpreter(e, tried)
    if not log or e.progress:
        return
    name = log[-1].match[log[-1].match.lastindex or 0]
    near = [] if name in USUAL else difflib.get_close_matches(name, USUAL, n=1, cutoff=0.75)
    where = e.probes.search(rf"/\S+/{re.escape(name)}\b|/\S*venv\S*/bin/python") if name else []
    yield e.found(
        "env.path",
        f"{name} is not on the container's PATH" + (f"; did you mean {near[0]}?" if near else ""),
        [*log[-3:], *(li for li, _ in where[:1])],
        f"in the container: command -v {name}; ls /usr/local/bin /opt/*/bin | grep {name}\n"
        "pct exec gives PATH=/sbin:/bin:/usr/sbin:/usr/bin: export "
        "PATH=/opt/venv/bin:/usr/local/bin:$PATH\n"
        "in start_training.sh, or set `python:` in the inventory; Debian has python3, not python",
        confidence=0.9,
    )


OWN_WAY = ("probe:pct", "probe:ssh")
"""What our own way into a container said: there the program is the inventory's interpreter."""


def _no_interpreter(e: Evidence, hits: list[Hit]) -> Finding:
    hit = hits[-1]
    path = hit.match[hit.match.lastindex or 0] or e.place.python
    number = container_of(e)
    denied = "Permission denied" in hit.line.text
    folder = path.rpartition("/bin/")[0]
    system = folder in ("", "/usr")  # the package's place: no virtual environment belongs there
    make = "apt install -y python3" if system else f"python3 -m venv {folder}"
    return e.found(
        "env.path",
        f"{path} in the container is not executable"
        if denied
        else f"the container has no {path}, which the inventory names as its interpreter",
        hits[:3],
        f"in the inventory: `python:` of {target_of(e)}; what there is: pct exec {number} -- sh -c "
        f"'ls -l {path} /usr/bin/python3* /opt/*/bin/python*'\n"
        f"or make it: pct exec {number} -- {make}\n"
        "what runs there is unknown, not failed: the agent needs an interpreter to look",
        confidence=0.95,
        lasting=True,
    )


def _ignored(e: Evidence, hit: Hit) -> bool:
    if e.recovered(hit.line):
        return True
    following = next((li for li in e.lines if li.number == hit.line.number + 1), None)
    return following is not None and "(ignored)" in following.text


RULES = (missing_module, versions, drift, moved_environment, command_path)
