"""MLA: how many parts of each ring are on their way, for call_q.sh."""
import subprocess
from pathlib import Path
def take(name):
    to = Path("/work/main/scratch/v")/name; to.mkdir(parents=True)
    subprocess.run(f"git -C /work/main archive HEAD treeattn csrc | tar xf - -C {to}", shell=True, check=True)
    return to
def edit(path, *pairs):
    t = path.read_text()
    for old, new in pairs:
        assert t.count(old) == 1, (path, old, t.count(old))
        t = t.replace(old, new)
    path.write_text(t)
def capped(f, latents, ropes):
    edit(f / "csrc/mla_producer.cuh",
         ("  __device__ __forceinline__ u32 barrier() const { return full + 8 * place.stage(); }\n",
          "  __device__ __forceinline__ u32 barrier() const { return full + 8 * place.stage(); }\n"
          f"  static constexpr u32 ON_THE_WAY = PARTS == 2 ? {latents} : {ropes};\n"
          "  __device__ __forceinline__ void wait_full() const {\n"
          "    const u32 stage = place.stage() < ON_THE_WAY ? place.stage() + STAGES - ON_THE_WAY : place.stage() - ON_THE_WAY;\n"
          "    barrier_wait(full + 8 * stage, place.phase() ^ (place.stage() < ON_THE_WAY));\n  }\n"),
         ("        const u32 to = ring.wait(), barrier = ring.barrier();\n",
          "        if (first * Ring::PARTS + part * boxes >= Ring::ON_THE_WAY * boxes) ring.wait_full();\n"
          "        const u32 to = ring.wait(), barrier = ring.barrier();\n"))
take("c0"); capped(take("c11"), 1, 1); capped(take("c21"), 2, 1); capped(take("c22"), 2, 2); capped(take("c32"), 3, 2)
f = take("c22n"); capped(f, 2, 2); edit(f/"csrc/ptx.cuh", ("EVICT_FIRST = 0x12F0", "EVICT_FIRST = 0x1000"))
