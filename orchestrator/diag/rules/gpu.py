"""A GPU that was reached and then failed: memory, Xid, illegal access, architecture, clocks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding
from orchestrator.diag.text import Line

OOM = (
    r"\b(?:CUDA|HIP|XPU|NPU) out of memory",
    r"torch\.(?:cuda\.)?OutOfMemoryError",
    r"(?:CUDA|CUDA driver|HIP) error: out of memory|Triton Error \[CUDA\]: out of memory",
    r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
    r"(?:CUBLAS|CUSPARSE|CUSOLVER|CUDNN)_STATUS_ALLOC_FAILED",
    r"Cuda failure (?:2 )?'out of memory'",
    # vLLM
    r"No available memory for the cache blocks|number of tokens that can be stored in KV cache",
    # Asked of NVML only to tell of an allocation that failed.
    r"NVML_SUCCESS == \w+ INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",
    r"RESOURCE_EXHAUSTED: Out of memory|std::bad_alloc: .*out_of_memory: CUDA",
)
_NO_ALLOCATOR = re.compile(r"(?:Value|Key|Type|Name|Index|Attribute|Assertion|Syntax)Error")
_VLLM = re.compile(r"cache blocks|KV cache")
_TRITON = re.compile(r"out of resource|Hardware limit|No valid triton configs|choice ")
ILLEGAL = (
    r"an illegal memory access was encountered|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS",
    r"misaligned address|cudaErrorMisalignedAddress",
    r"device-side assert triggered|cudaErrorAssert\b|CUDA_ERROR_ASSERT",
    r"^\S*\.cuh?:\d+: .*Assertion .* failed",
    r"Assertion `[^`]*` failed\.?\s*$",
    r"CUDA error: (?:unspecified launch failure|an illegal instruction|invalid program counter|"
    r"invalid address space|hardware stack error|the launch timed out)",
    r"Invalid __(?:global|shared|local)__ (?:read|write) of size",
    r"\b(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_EXECUTION_FAILED\b",
    r"Warp (?:Illegal Address|Out-of-range Address|Misaligned Address)",
)
ARCH = (
    r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
    r"CUDA capability sm_\d+\w* is not compatible with the current PyTorch installation",
    r"PyTorch no longer supports this GPU because it is too old",
    r"GPUTooOldForTriton|too old to be supported by the triton GPU compiler",
    r"(?:FlashAttention|flash_attn)[^\n]*only supports (?:Ampere|Hopper|Turing) GPUs",
    r"the provided PTX was compiled with an unsupported toolchain|"
    r"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    r"device kernel image is invalid|CUDA_ERROR_INVALID_(?:IMAGE|PTX)|CUDA_ERROR_NO_BINARY_FOR_GPU",
    r"not supported on CUDA arch [<>=]",
    r"Expected is_sm\d+ [^\n]*to be true, but got false",
    r"only supported on [^\n]*(?:compute capability|sm_\d)",
    r"(?:requires|needs) (?:compute capability|CUDA capability|sm_)\D{0,10}\d+[^\n]*(?:but|"
    r"found|got)",
)
# NVIDIA's Xid catalogue: number, meaning, whether the card or driver (and not the program) failed.
XIDS: dict[int, tuple[str, bool]] = {
    8: ("GPU stopped processing (timeout)", True),
    13: ("graphics engine exception: usually the program", False),
    31: ("GPU memory page fault: usually the program", False),
    32: ("corrupted push buffer stream", True),
    38: ("driver firmware error", True),
    43: ("GPU stopped processing: usually the program", False),
    44: ("graphics engine fault during context switch", True),
    45: ("channels torn down early, after another error or a kill", False),
    48: ("double-bit ECC error: the card's memory is failing", True),
    54: ("auxiliary power is not connected", True),
    56: ("display engine error", True),
    61: ("internal micro-controller breakpoint", True),
    62: ("internal micro-controller halt", True),
    63: ("ECC page retirement or row remapping recorded", True),
    64: ("ECC page retirement or row remapping failed", True),
    66: ("illegal access by driver", True),
    68: ("video processor exception", True),
    69: ("graphics engine class error", False),
    74: ("NVLink error", True),
    79: ("GPU has fallen off the bus (power, heat, riser, PCIe)", True),
    92: ("high single-bit ECC error rate", True),
    94: ("contained ECC error: one program was ended", True),
    95: ("uncontained ECC error: the card needs a reset", True),
    109: ("context switch timeout", True),
    110: ("security fault", True),
    119: ("GSP RPC timeout: the card's firmware does not answer", True),
    120: ("GSP error", True),
    121: ("C2C link error", True),
    122: ("SPI PMU read failure", True),
    137: ("NVLink fabric memory fault", True),
    140: ("unrecovered ECC error", True),
    143: ("GPU initialization error", True),
    144: ("NVLink SAW error", True),
    145: ("NVLink RLW error", True),
    149: ("NVLink NETIR error", True),
    150: ("NVLink MSE error", True),
    151: ("key rotation error", True),
    154: ("GPU recovery action changed: reset or reboot needed", True),
    155: ("NVLink software-defined error", True),
    158: ("GPU fatal timeout", True),
}
LOST = (
    r"fallen off the bus",
    r"GPU is lost|GPU_IS_LOST|NVML_ERROR_GPU_IS_LOST",
    r"GPU requires (?:a )?reset",
    r"(?<!no )(?<!\b0 )uncorrectable (?:NVLink |ECC )error(?!s?(?: count)?\s*[:=]?\s+0\b)",
    r"cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
    r"Unable to determine the device handle for (?:GPU|gpu)",
    r"cudaErrorNvlinkUncorrectable|RmInitAdapter failed",
    r"rm_init_adapter failed|GPU at PCI\S* has fallen",
)
_XID = r"Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)|\bXid[ :=]+(\d{1,3})\b"


def out_of_memory(e: Evidence) -> Iterator[Finding]:
    """torch's allocator since 1.x (``CUDA out of memory. Tried to allocate 24.00 GiB``; type
    ``torch.OutOfMemoryError`` since 2.5), cuBLAS's ALLOC_FAILED, NCCL's ``Cuda failure 'out of
    memory'``. Triton's ``OutOfMemoryError: out of resource`` speaks of shared memory in one kernel
    and is another matter."""
    hits = [h for h in e.search(*OOM) if not _TRITON.search(h.line.text)]
    # Quoted by an exception of a type that no allocator raises.
    quoted = {f.line for f in e.failures if f.headed and _NO_ALLOCATOR.fullmatch(f.name)}
    hits = [h for h in hits if h.line not in quoted or _VLLM.search(h.line.text)]
    if not hits:
        return
    first = next((h.line for h in hits if "Tried to allocate" in h.line.text), hits[0].line)
    text = first.text
    if first.source == "log":
        # A terminal or a pager may have broken the long message.
        after = [li for li in e.lines if 0 <= li.number - first.number < 12]
        text = " ".join(li.text.strip() for li in after if li.stream == first.stream)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    reserved = re.search(r"([\d.]+) (GiB|MiB) is reserved by PyTorch but unallocated", text)
    fragmented = False
    if reserved and asked:
        need = re.match(r"([\d.]+) (GiB|MiB)", asked[1])
        gib = {"GiB": 1.0, "MiB": 1 / 1024}
        if need is not None:
            fragmented = float(reserved[1]) * gib[reserved[2]] > float(need[1]) * gib[need[2]]
    title = "CUDA ran out of memory"
    if asked:
        title += f": {asked[1]} asked for" + (f", {free[1]} free" if free else "")
    if fragmented and reserved:
        title += f"; {reserved[1]} {reserved[2]} lie reserved but unallocated: fragmentation"
    yield e.found(
        "gpu.oom",
        title,
        hits[:3],
        (
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # fragmentation\n"
            if fragmented
            else ""
        )
        + "python -m trainer check config.yaml   # what the run needs\n"
        "smaller batch or sequence length, fewer anchors, activation checkpointing\n"
        "nvidia-smi   # does anybody else hold memory on that card?",
        confidence=0.95,
    )


def xid(e: Evidence) -> Iterator[Finding]:
    """``NVRM: Xid (PCI:0000:db:00): 48, pid=…`` in the host's kernel log. 13, 31, 43, 45 and 69
    come from the program (an illegal access): there the program's error leads, and the Xid is a
    remark."""
    lines = [(hit.line, int(hit[2] or hit[3])) for hit in e.search(_XID, system=True)]
    lost = e.search(*LOST, system=True)
    if not lines and not lost:
        return
    hardware = [(li, n) for li, n in lines if XIDS.get(n, ("", True))[1]]
    failing = e.outcome.state != "finished" and _in_trouble(e)
    illegal = e.search(*ILLEGAL)
    if not hardware and not lost and (illegal or not failing):
        if illegal and lines:
            yield _xid_finding(e, lines, [], False, 0.4)
        return
    silent = not e.errors and e.outcome.state == "failed"
    if _unrelated(e) or (silent and not hardware and not lost):
        return
    yield _xid_finding(e, hardware or lines, [h.line for h in lost], failing, 0.95)


def _xid_finding(
    e: Evidence, lines: list[tuple[Line, int]], lost: list[Line], failing: bool, confidence: float
) -> Finding:
    numbers = sorted({n for _, n in lines})
    named = "; ".join(f"Xid {n}: {XIDS.get(n, ('not in the catalogue', True))[0]}" for n in numbers)
    bus = re.search(
        r"(?:PCI:|GPU )?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})",
        lines[0][0].text if lines else lost[0].text,
    )
    where = f" on {bus[1]}" if bus else ""
    return e.found(
        "gpu.xid",
        (named or "a GPU was lost") + where,
        [*(li for li, _ in lines[:4]), *lost[:3]],
        "on the host: dmesg -T | grep -i xid; nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT\n"
        "drain the card, stop its containers, then nvidia-smi --gpu-reset -i N, or reboot the "
        "host\n"
        "79, 74, 54: reseat the card, check power, riser and temperature; 48, 63, 64, 94, 95: "
        "RMA if it\n"
        "comes back; 119, 120: update driver and firmware",
        severity="fatal" if failing else "info",
        confidence=confidence,
    )


def _in_trouble(e: Evidence) -> bool:
    return (
        e.outcome.state == "failed"
        or bool(e.errors)
        or (e.outcome.state != "finished" and not _advancing(e))
    )


def _advancing(e: Evidence) -> bool:
    """Running, and its last words are steps."""
    now, write = e.probes.now, e.probes.last_write
    silent = e.probes.silence is not None or (
        now is not None and write is not None and now - write > 600
    )
    return bool(e.series) and e.outcome.last_line - e.outcome.last_step_line < 5 and not silent


def _unrelated(e: Evidence) -> bool:
    """The run died of an exception that no card can cause."""
    errors = [
        f for f in e.errors if f.headed and f.line.source == "log" and not e.recovered(f.line)
    ]
    return bool(errors) and not any(
        re.search(
            r"(?i)cuda|nccl|nvml|gpu|device|cudnn|cublas|watchdog|DataLoader|timeout|timed out",
            f.text,
        )
        for f in errors
    )


def illegal_access(e: Evidence) -> Iterator[Finding]:
    """CUDA 700, 716, 710 and the kernels' own ``Assertion `t >= 0 && t < n_classes` failed``, which
    comes before the host notices. Later collectives time out: that is the echo."""
    hits = [
        h
        for h in e.search(*ILLEGAL)
        if not re.search(r"\.cpp:\d+: .*Assertion|python: ", h.line.text)
    ]
    if not hits:
        return
    kernel = next((h for h in hits if "Assertion" in h.line.text), None)
    title = "a kernel failed on the device: "
    if kernel is not None:
        asserted = re.search(r"Assertion `?([^`']+)[`']? failed", kernel.line.text)
        title += f"assertion {asserted[1]}" if asserted else "assertion"
        if re.search(
            r"t >= 0 && t < n_classes|srcIndex < srcSelectDimSize|index out of bounds|"
            r"index < sizes|idx_dim",
            kernel.line.text,
        ):
            title += " (an index or label outside of its table)"
    else:
        title += hits[0].match[0][:80]
    yield e.found(
        "gpu.illegal_access",
        title,
        hits[:4],
        "CUDA_LAUNCH_BLOCKING=1 TORCH_USE_CUDA_DSA=1 on a short run: the traceback then points "
        "right\n"
        "compute-sanitizer --tool memcheck python …   # for one's own kernels\n"
        "labels and token ids: assert 0 <= x < size on the CPU before the step"
        + (
            "\nat the first step already: a torch older than the card; torch.cuda.get_arch_list()"
            if "EXECUTION_FAILED" in title
            else ""
        ),
        confidence=0.92,
    )


def arch(e: Evidence) -> Iterator[Finding]:
    """CUDA 209 ``no kernel image is available``: the wheel has no code for this card. torch warns
    before: ``sm_120 is not compatible``, ``Found GPU0 … which is of cuda capability 3.7``."""
    hits = e.search(*ARCH)
    hard = [
        h for h in hits if "is not compatible" not in h.line.text and "no longer" not in h.line.text
    ]
    card = e.search(
        r"Found GPU\d+ .*(?:cuda capability|too old)|(?:Minimum|maximum).*cuda capability"
    )
    if not hits or (not hard and e.recovered(hits[0].line)):
        return
    yield e.found(
        "gpu.arch_unsupported",
        "this torch (or extension) has no code for this GPU",
        [*card[:1], *(hard or hits)[:3]],
        "python -c 'import torch; print(torch.cuda.get_device_capability(), "
        "torch.cuda.get_arch_list())'\n"
        "install a wheel that lists it (newer cards: newer CUDA; Volta and older: torch ≤ 2.7 "
        "cu126)\n"
        "rebuild extensions: TORCH_CUDA_ARCH_LIST='9.0;12.0' pip install --no-build-isolation …",
        confidence=0.92 if hard else 0.75,
    )


_REASONS = (
    r"(?:SW Power Cap|HW Slowdown|HW Thermal Slowdown|HW Power Brake(?: Slowdown)?|"
    r"SW Thermal Slowdown|"
    r"Sync Boost)\s*:? +Active",
    r"(?i)clocks_(?:throttle|event)_reasons\S*\D{1,5}0x0*[1-9a-f]\w*",
    r"(?:CPU|GPU|[Pp]ackage).{0,20}temperature above threshold|thermal (?:slowdown|throttl)|"
    r"power brake",
    r"(?i)\bthrottl(?:ed|ing)\b[^\n]*(?:thermal|power|heat|temp)|(?:thermal|power|"
    r"heat)[^\n]*\bthrottl(?:ed|ing)\b",
)


def throttled(e: Evidence) -> Iterator[Finding]:
    """nvidia-smi's clock event reasons (``SW Power Cap : Active``), or a busy card far below its
    sisters' or its own maximum clock."""
    hits = [h for h in e.search(*_REASONS, system=True) if "Not Active" not in h.line.text]
    # A power cap that costs little is every full card's daily life: it needs low clocks or a slow
    # run.
    hot = [h for h in hits if not re.search(r"SW Power Cap|Sync Boost|0x0+4\b", h.match[0])]
    slow = _slow_clocks(e)
    if not (slow or hot):
        return
    if not slow and not _dropped(e):
        return
    yield e.found(
        "gpu.throttled",
        "GPU clocks are held down" + (f": {slow[0].text.strip()[:90]}" if slow else ""),
        [*slow[:3], *hits[:3]],
        "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE\n"
        "heat: fans, airflow, filters, inlet temperature; power: nvidia-smi -pl WATTS, cables, "
        "PSU\n"
        "a clock lock left behind: nvidia-smi -rgc",
        severity="warning",
        confidence=0.88,
        lasting=True,
    )


def _slow_clocks(e: Evidence) -> list[Line]:
    rows: list[tuple[float, float, Line]] = []
    for li, m in e.probes.search(r"^\s*\d+, .*?(\d{1,3}) %.*?(\d{2,5}) MHz(?:.*?(\d{2,5}) MHz)?"):
        util, clock, top = float(m[1]), float(m[2]), m[3]
        if util >= 50:
            rows.append((clock, max(float(top or 0), clock), li))
    if not rows:
        return []
    best = max(top for _, top, _ in rows)
    return [li for clock, _, li in rows if clock < 0.6 * best or clock < 700]


def _dropped(e: Evidence) -> bool:
    rates = [r for _, r in e.series.rates()]
    return not rates or (len(rates) > 4 and min(rates[-3:]) < 0.8 * max(rates))


RULES = (out_of_memory, xid, illegal_access, arch, throttled)
