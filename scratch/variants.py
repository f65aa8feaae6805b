import re,sys
root='/work/main/scratch/v/'
def edit(v,f,*pairs):
    p=root+v+'/csrc/'+f; s=open(p).read()
    for a,b in pairs:
        assert s.count(a)==1,(v,f,a,s.count(a)); s=s.replace(a,b)
    open(p,'w').write(s)
WARM='''// Translations of what the block reads and writes outside of the caches are asked for while the kernel before still runs: a lane
// for each address of the params struct. Nothing is read.
__device__ __forceinline__ void warm(const AttentionParams& p, u32 block, u32 lane) {
  constexpr u32 ADDRESSES = 24, WORK = 12;
  if (lane < ADDRESSES) {
    const u64 at = reinterpret_cast<const u64*>(&p.q)[lane];
    if (at != 0) prefetch_line(at + (lane == WORK ? block * WORK_FIELDS * 4 : 0));
  }
}

// The plan's record of a block'''
LINE='''__device__ __forceinline__ void prefetch_line(u64 at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

__device__ __forceinline__ void prefetch(const TensorMap& map)'''
edit('warm0','ptx.cuh',('__device__ __forceinline__ void prefetch(const TensorMap& map)',LINE))
edit('warm0','schedule.cuh',('// The plan\'s record of a block,',WARM+','))
edit('warm0','producer.cuh',('    find_thread();\n    wait_prerequisites();','    find_thread();\n    warm(p, blockIdx.x, lane);\n    wait_prerequisites();'))
edit('warm0','mla_producer.cuh',('    find_lane();\n    wait_prerequisites();','    find_lane();\n    warm(p, blockIdx.x, lane);\n    wait_prerequisites();'))
DRY=('''  __device__ __forceinline__ void begin() {
    begin_walk();
    find();
  }
''','''  __device__ __forceinline__ void begin() {
    find_thread();
    if (lane == 0) memory.passed = memory.num_parts = 0;
#pragma unroll 1
    for (u32 pass = 0; pass < 2; ++pass) {
      if (lane < PLANNED_FIELDS) reinterpret_cast<i32*>(&memory.walk)[lane] = 1;
      if (pass == 1) {
        wait_prerequisites();
        STAMP1
        launch_dependents();
        if (lane < PLANNED_FIELDS) reinterpret_cast<i32*>(&memory.walk)[lane] = planned(p, blockIdx.x, lane);
      }
      __syncwarp();
      STAMP2
      find_item();
      STAMP3
      if (memory.walk.tiles != 0) find_boxes(memory.walk, 0);
    }
  }
''')
edit('dry','producer.cuh',(DRY[0],re.sub(r' *STAMP\d\n','',DRY[1])))
edit('sdry','producer.cuh',(DRY[0],DRY[1].replace('STAMP1','stamp(2, 1, 1);').replace('STAMP2','stamp(2, 1, 2);').replace('STAMP3','stamp(2, 1, 3);').replace('    find_thread();\n','    find_thread();\n    stamp(2, 1, 0);\n',1)))
STAMP='''extern "C" __device__ unsigned long long treeattn_stamps[256 * 3 * 64];

namespace treeattn {

__device__ __forceinline__ void stamp(u32 role, u32 item, u32 at) {
  if (item < 8 && threadIdx.x % 32 == 0) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    treeattn_stamps[(blockIdx.x * 3 + role) * 64 + item * 8 + at] = now;
  }
}

constexpr u32 ITEMS = 4;'''
for v in ('s0','sfp','sdry'):
    edit(v,'ring.cuh',('namespace treeattn {\n\nconstexpr u32 ITEMS = 4;',STAMP))
    edit(v,'consumer.cuh',
      ('    first_tile(scores, out, q, at, full == 0, cached);','    if (thread_in_block() == 0) stamp(0, place.item(), 1);\n    first_tile(scores, out, q, at, full == 0, cached);\n    if (thread_in_block() == 0) stamp(0, place.item(), 2);'),
      ('    wait_full(place, 0, threads_copied(0, edge, cached));','    wait_full(place, 0, threads_copied(0, edge, cached));\n    if (thread_in_block() == 0) stamp(0, place.item(), 3);'),
      ('      item(at);\n','      if (thread_in_block() == 0) stamp(0, place.item(), 0);\n      item(at);\n      if (thread_in_block() == 0) stamp(0, place.item(), 5);\n'),
      ('    if (p.split == 0) Merge<Io, HEAD_DIM, CONSUMERS, Memory>(p, memory).run();','    if (thread_in_block() == 0) stamp(1, 0, 0);\n    if (p.split == 0) Merge<Io, HEAD_DIM, CONSUMERS, Memory>(p, memory).run();\n    if (thread_in_block() == 0) stamp(1, 0, 1);'))
    if v!='sdry':
        edit(v,'producer.cuh',('    find_thread();\n    wait_prerequisites();\n','    find_thread();\n    stamp(2, 1, 0);\n    wait_prerequisites();\n    stamp(2, 1, 1);\n'),
          ('    begin_walk();\n','    begin_walk();\n    stamp(2, 1, 2);\n'))
        if v=='s0': edit(v,'producer.cuh',('  __device__ __forceinline__ void find() {\n    find_item();\n','  __device__ __forceinline__ void find() {\n    find_item();\n    stamp(2, 2 - 1, 3);\n'))
        else: edit(v,'producer.cuh',('    find_item();\n  }\n\n  __device__ __forceinline__ void begin_walk()','    find_item();\n    stamp(2, 1, 3);\n  }\n\n  __device__ __forceinline__ void begin_walk()'))
    edit(v,'producer.cuh',('        publish(place);\n','        { publish(place); stamp(2, place.item() == 0 ? 1 : 9, 4); }\n'),
      ("          full_boxes(at);\n","          if (place.item() == 0) stamp(2, 1, 5);\n          full_boxes(at);\n"),
      ("        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage()][half]);\n","        const u32 to = wait_empty(half), barrier = shared_address(&memory.full[place.stage()][half]);\n        if (place.item() == 0 && first == 0 && half == 0) stamp(2, 1, page == 0xFFFFFFF0 ? 7 : 6);\n"))
