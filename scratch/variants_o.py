"""A ring of many stages of which few are on their way, for call_o.sh."""
import shutil, sys
sys.path.insert(0, "/work/wt/exp/scratch")
import variants_n as n
shutil.rmtree("/work/main/scratch/v")
m, take, edit = n.m, n.take, n.edit

def capped(folder, c2, c3, c1):
    edit(folder / "csrc/producer.cuh",
         ("        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage()][half]);\n",
          f"""        constexpr u32 FLIGHT = HEAD_DIM != 128 ? 0 : CONSUMERS == 1 ? {c1} : CONSUMERS == 2 ? {c2} : {c3};
        if (FLIGHT > 0 && FLIGHT < STAGES && first >= FLIGHT * boxes) {{
          const bool around = place.stage() < FLIGHT;
          const u32 stage = place.stage() + (around ? STAGES : 0) - FLIGHT;
          barrier_wait(shared_address(&memory.full[stage][half]), place.phase() ^ around);
        }}
        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage()][half]);
"""))

def base(name, c2=6, c3=5, c1=3, cap=None):
    f = n.base(name, c2, c3, c1)
    n.partials_last(f)
    if cap: capped(f, *cap)
    return f

take("v0")
base("b4", 4, 4, 3)
base("b6f4", cap=(4, 4, 3)); base("b6f3", cap=(3, 3, 2)); base("b6f2", cap=(2, 2, 1))
base("b5f3", 5, 5, 3, cap=(3, 3, 2))
m.half_partials(base("b6f3h", cap=(3, 3, 2)), 22)
