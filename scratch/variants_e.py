"""Variants of main for call_e.sh, in /work/main/scratch/v: merges of other shapes, code of MLA moved by a few instructions."""
import subprocess
from pathlib import Path

ROOT = Path(__import__("sys").argv[1] if len(__import__("sys").argv) > 1 else "/work/main/scratch/v")


def take(name: str, branch: str = "main") -> Path:
    to = ROOT / name
    to.mkdir(parents=True, exist_ok=True)
    what = ["treeattn", "csrc", "tests", "benchmarks/profile_rows.py"]
    archive = subprocess.run(["git", "-C", "/work/main", "archive", branch, *what], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(to)], input=archive.stdout, check=True)
    return to


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, (path, old, text.count(old))
        text = text.replace(old, new)
    path.write_text(text)


take("v0")
take("next", "wip/next")
fin = take("fin")
edit(
    fin / "treeattn/kernels/launch.py",
    ("    arguments = {\n        \"spans_ptr\": step.buffers.spans,\n        \"row_request_ptr\"",
     "    import os\n    if os.environ.get('FIN') and not step.batch_invariant:\n"
     "        chunk_rows, dims = (int(x) for x in os.environ['FIN'].split(',')[:2])\n"
     "        chunks = triton.cdiv(tile_rows, chunk_rows)\n"
     "        parts = min(parts, max(int(os.environ.get('FIN_ELEMENTS', '4096')) // (dims * chunk_rows), 1))\n"
     "    arguments = {\n        \"spans_ptr\": step.buffers.spans,\n        \"row_request_ptr\""),
    ("        options = {\"num_warps\": 1, \"enable_fp_fusion\": True}",
     "        import os\n        warps = int(os.environ['FIN'].split(',')[2]) if os.environ.get('FIN') else 1\n"
     "        options = {\"num_warps\": warps, \"enable_fp_fusion\": True}"),
)
for count in (1, 2, 3, 5, 7, 11):
    moved = take(f"nop{count}")
    lines = "".join('  asm volatile("nanosleep.u32 0;");\n' for _ in range(count))
    edit(moved / "csrc/mla_sm90.cuh", ("  Producer producer(p, memory);\n\n  if (uniform(warp) == 15)", lines + "  Producer producer(p, memory);\n\n  if (uniform(warp) == 15)"))
