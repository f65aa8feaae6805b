"""More variants of main than variants_l.py makes, for call_m.sh: copies alone and no copies, each with hints and stages."""
import sys
sys.argv = sys.argv[:1]
sys.path.insert(0, "/work/wt/exp/scratch")
from variants_l import *  # makes those of call_l.sh too

def copies_alone(folder):
    edit(folder / "csrc/consumer.cuh",
         ("    if (uniform(at.row0) + warpgroup() * 64 >= uniform(at.row_end)) {", "    if (p.q != nullptr) {"))

def no_copies(folder):
    path = folder / "csrc/producer.cuh"
    text = path.read_text()
    old_expect = "          barrier_expect(barrier, Memories::HALF_BYTES);\n          barrier_arrive(barrier, PRODUCER_ARRIVALS - 1);\n"
    assert text.count(old_expect) == 1
    text = text.replace(old_expect, "          barrier_arrive(barrier, PRODUCER_ARRIVALS);\n")
    at = text.index("        if (lane < boxes)\n          copy_panels(")
    end = text.index("page, barrier);\n", at) + len("page, barrier);\n")
    text = text[:at] + "        if (to == 0) pages = page + within + boxes + head;\n" + text[end:]
    path.write_text(text)

def no_softmax(folder):
    edit(folder / "csrc/consumer.cuh", ("      softmax(scores, out, true);\n", ""))

no_copies(take("nocopy"))
copies_alone(take("cpo"))
for stages in (2, 3, 4):
    f = take(f"cpo_s{stages}"); copies_alone(f); staged(f, stages)
for kind in ("first", "last"):
    f = take(f"cpo_e{kind}"); copies_alone(f); hinted(f, kind)
f = take("cpo_p2"); copies_alone(f); promoted(f, 2)
f = take("cpo_p0"); copies_alone(f); promoted(f, 0)
no_softmax(take("nosoft"))
f = take("elast_p2"); hinted(f, "last"); promoted(f, 2)
f = take("s2"); staged(f, 2)

def one_panel_boxes(folder):
    edit(folder / "treeattn/cuda/launch.py",
         ("(self.dims, GROUP, self.head_dim // self.dims, self.rows // GROUP, 1)", "(self.dims, GROUP, 1, self.rows // GROUP, 1)"))
    path = folder / "csrc/producer.cuh"
    edit(path, ("__shfl_sync(~0u, pages, first + lane);", "__shfl_sync(~0u, pages, first);"),
         ("at.full_key + (first + lane) * rows, within", "at.full_key + first * rows, within"),
         ("        if (lane < boxes)\n          copy_panels(to + lane * rows * ROW_BYTES,", "        if (lane < 2)\n          copy_panels(to + lane * 8192,"),
         ("head_panel(head, half == 0 ? p.stride_k_head : p.stride_v_head), within", "head_panel(head, half == 0 ? p.stride_k_head : p.stride_v_head) + lane, within"))

f = take("cpo_box"); copies_alone(f); one_panel_boxes(f)
f = take("cpo_box_p2"); copies_alone(f); one_panel_boxes(f); promoted(f, 2)

def half_partials(folder, in_flight):
    edit(folder / "csrc/consumer.cuh",
         ("        float* to = p.partial_out + (part_row + local) * HEAD_DIM + lane % 4 * 4;\n",
          "        unsigned short* to = reinterpret_cast<unsigned short*>(p.partial_out) + (part_row + local) * HEAD_DIM + lane % 4 * 4;\n"),
         ("          store_four(to + 8 * j, out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse,\n"
          "                     out[4 * j + 4 + 2 * half] * inverse, out[4 * j + 5 + 2 * half] * inverse);\n",
          "          store_two(reinterpret_cast<float*>(to + 8 * j), __uint_as_float(pack<Fp16>(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse)),\n"
          "                    __uint_as_float(pack<Fp16>(out[4 * j + 4 + 2 * half] * inverse, out[4 * j + 5 + 2 * half] * inverse)));\n"),
         ("FP8 ? 18 : 22;", f"FP8 ? 18 : {in_flight};"))
    edit(folder / "csrc/merge.cuh",
         ("float values[ROWS][PARTS][4] = {}, lse[ROWS][PARTS];", "u32 values[ROWS][PARTS][2] = {}; float lse[ROWS][PARTS];"),
         ("const float* const out_at = p.partial_out + place * HEAD_DIM + column * 4;",
          "const unsigned short* const out_at = reinterpret_cast<unsigned short*>(p.partial_out) + place * HEAD_DIM + column * 4;"),
         ("load_four(values[r][i], out_at", "load_pair(values[r][i], out_at"),
         ("          for (int j = 0; j < 4; ++j) rows[r].out[j] += weight * values[r][i][j];",
          "          for (int j = 0; j < 4; ++j) rows[r].out[j] += weight * half_number(values[r][i][j / 2] >> j % 2 * 16);"))
    path = folder / "csrc/ptx.cuh"
    text = path.read_text()
    mark = "// The same of one number, else another.\n"
    assert text.count(mark) == 1
    path.write_text(text.replace(mark, '''__device__ __forceinline__ void load_pair(u32 (&to)[2], const void* from, bool there) {
  asm volatile(
      "{\\n\\t.reg .pred p;\\n\\tsetp.ne.b32 p, %3, 0;\\n\\t"
      "@p ld.global.cg.v2.b32 {%0, %1}, [%2];\\n\\t}"
      : "+r"(to[0]), "+r"(to[1])
      : "l"(from), "r"(static_cast<int>(there))
      : "memory");
}
__device__ __forceinline__ float half_number(u32 bits) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(static_cast<unsigned short>(bits)));
  return number;
}

''' + mark))

half_partials(take("h22"), 22)
half_partials(take("h33"), 33)
