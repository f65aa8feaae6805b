"""Variants of main for call_l.sh, in /work/main/scratch/v: stages of the ring, hints and promotion of L2 for the copies of K and V."""
import subprocess
from pathlib import Path

ROOT = Path(__import__("sys").argv[1] if len(__import__("sys").argv) > 1 else "/work/main/scratch/v")


def take(name: str, branch: str = "main") -> Path:
    to = ROOT / name
    to.mkdir(parents=True, exist_ok=True)
    what = ["treeattn", "csrc", "tests", "benchmarks/profile_rows.py", "benchmarks/gpu_cubins.py", "benchmarks/sustained.py"]
    archive = subprocess.run(["git", "-C", "/work/main", "archive", branch, *what], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(to)], input=archive.stdout, check=True)
    return to


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, (path, old, text.count(old))
        text = text.replace(old, new)
    path.write_text(text)


HINT = {"first": "0x12F0000000000000", "last": "0x14F0000000000000", "normal": "0x1000000000000000"}


def hinted(folder: Path, kind: str) -> None:
    path = folder / "csrc/ptx.cuh"
    text = path.read_text()
    for axes in ("4d", "5d"):
        at = text.index(f"cp.async.bulk.tensor.{axes}.shared::cluster.global.tile.mbarrier::complete_tx::bytes")
        end = text.index('"memory");', at)
        body = text[at:end]
        body = body.replace("complete_tx::bytes ", "complete_tx::bytes.L2::cache_hint ").replace("[%6];", "[%6], %7;")
        body = body.replace('"r"(barrier)', f'"r"(barrier), "l"({HINT[kind]}ull)')
        assert "%7;" in body and "ull" in body, body
        text = text[:at] + body + text[end:]
    path.write_text(text)


def promoted(folder: Path, code: int) -> None:
    edit(folder / "treeattn/driver.py", ("    promotion = PROMOTE_128B if dtype == UINT8 else PROMOTE_256B\n", f"    promotion = {code}\n"))


def staged(folder: Path, stages: int) -> None:
    path = folder / "csrc/attention_sm90_d128.cu"
    text = path.read_text()
    for kind in ("bf16", "fp16"):
        name = {"bf16": "Bf16", "fp16": "Fp16"}[kind]
        old = f"TREEATTN_ATTENTION(attention_sm90_{kind}_d128_c2_n64, {name}, 128, 2, 64, 6, "
        assert text.count(old) == 1
        text = text.replace(old, old.replace(", 6, ", f", {stages}, "))
    path.write_text(text)


take("v0")
for stages in (3, 4, 5):
    staged(take(f"s{stages}"), stages)
for kind in ("first", "last"):
    hinted(take(f"e{kind}"), kind)
for code in (0, 2):
    promoted(take(f"p{code}"), code)
both = take("efirst_p2")
hinted(both, "first")
promoted(both, 2)
