"""Evict-first copies, 128 bytes of promotion, fewer stages and 16-bit partials together, for call_n.sh."""
import re, shutil, sys
sys.path.insert(0, "/work/wt/exp/scratch")
import variants_m as m
from pathlib import Path
shutil.rmtree("/work/main/scratch/v")
take, edit, hinted, promoted = m.take, m.edit, m.hinted, m.promoted

def stages(folder, c2, c3, c1):
    path = folder / "csrc/attention_sm90_d128.cu"
    text = path.read_text()
    for c, n in ((1, c1), (2, c2), (3, c3)):
        text, k = re.subn(rf"(_c{c}_n64, \w+, 128, {c}, 64, )\d+", rf"\g<1>{n}", text)
        assert k == 2
    path.write_text(text)

def unchanged(folder):
    path = folder / "csrc/ptx.cuh"
    text = path.read_text()
    for axes in ("4d", "5d"):
        at = text.index(f"cp.async.bulk.tensor.{axes}.shared::cluster.global.tile.mbarrier::complete_tx::bytes")
        end = text.index('"memory");', at)
        body = text[at:end]
        body = body.replace("complete_tx::bytes ", "complete_tx::bytes.L2::cache_hint ").replace("[%6];", "[%6], %7;")
        body = body.replace('"r"(barrier)', '"r"(barrier), "l"(policy)')
        start = text.rindex("asm volatile(", 0, at)
        text = text[:start] + 'u64 policy;\n  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));\n  ' + text[start:at] + body + text[end:]
    path.write_text(text)

def partials_last(folder):
    edit(folder / "csrc/ptx.cuh",
         ('"st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory"',
          '"st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d), "l"(0x14F0000000000000ull) : "memory"'))

def base(name, c2=6, c3=5, c1=3, promotion=2, hint="first"):
    f = take(name)
    if hint: hinted(f, hint)
    if promotion != 3: promoted(f, promotion)
    stages(f, c2, c3, c1)
    return f

take("v0")
base("a6"); base("a5", 5); base("a4", 4, 4); base("a3", 3, 3, 2)
base("a4p0", 4, 4, promotion=0); base("n4", 4, 4, hint=None)
f = base("u4", 4, 4, hint=None); unchanged(f)
f = base("a4h", 4, 4); m.half_partials(f, 22)
f = base("a4l", 4, 4); partials_last(f)
