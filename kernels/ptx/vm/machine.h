/* The state of the machine. A launch is a set of CTAs; a CTA has warps, shared memory, mbarriers, named barriers,
   tensor memory and a list of asynchronous operations that have been issued and have not landed yet.

   Ordering is tracked with vector clocks. An *agent* is whatever can touch memory on its own: each thread, each
   thread's cp.async and bulk copies, each warp's wgmma, each TMA load in flight, the tcgen05 pipe. An *epoch* is
   (agent, clock). Two accesses to one place conflict unless the later one's agent knows the earlier one's epoch. */
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

#define LANES for (int l = 0; l < 32; l++)
#define FULL 0xffffffffu
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
#define OP(name) OP_##name,
#define PLAIN OP
#define CONVERGED OP
#define ALIGNED OP
#include "opcodes.h"
#undef OP
#undef PLAIN
#undef CONVERGED
#undef ALIGNED
  OP_COUNT
};

/* One decoded instruction. Operands are register slots; see program.py for the meaning of each field. */
typedef struct {
  i32 op, guard, d0, d1, s0, s1, s2, s3, imm, imm2, mod, list, n, line, touches, target;
} Insn;

/* Also what the number of a finding is: an address, a register slot, lanes, a barrier << 32 | threads, or a value. */
enum {
  SPACE_GLOBAL,
  SPACE_SHARED,
  SPACE_GENERIC,
  SPACE_TENSOR,
  SPACE_REGISTER,
  SPACE_LANES,
  SPACE_BARRIER,
  SPACE_VALUE,
  SPACE_NONE
};

/* Epochs: 0 is never written, 1 is written before the launch, else agent << 20 | clock. */
#define CLOCK_BITS 20
#define CLOCK_MASK ((1u << CLOCK_BITS) - 1)
#define EPOCH(agent, clock) ((u32)(agent) << CLOCK_BITS | (clock))
#define AGENT(epoch) ((epoch) >> CLOCK_BITS)
#define CLOCK(epoch) ((epoch) & CLOCK_MASK)
#define MAX_AGENTS 3072
#define READ_SHARED 0x80000000u /* of a read epoch: the rest is an index of a reader set */

/* What is known: ordered[a] is the newest clock of agent a that happened before; fenced[a] the newest whose generic
   writes the async proxy sees. Shared between lanes and operations, so it is copied before it changes. */
typedef struct Knowledge {
  i32 references;
  u32 *ordered, *fenced;
  struct Knowledge *next_free;
} Knowledge;

typedef struct {
  u64 va, bytes;
  u8 *host;
  u32 *written, *written_pc, *read, *read_pc; /* per granule; NULL for read-only memory */
  u16 *written_cta, *read_cta;
  i32 writable, pad;
} Allocation;

typedef struct {
  u32 valid, expected, pending, phase, init_pc, init_epoch, init_fenced;
  i64 tx;
  Knowledge *released, *completed;
} Mbarrier;

typedef struct {
  u32 arrived, generation;
  u32 expected;
  Knowledge *released;
} Barrier;

enum {
  ASYNC_CP,
  ASYNC_CP_ARRIVE,
  ASYNC_TMA_LOAD,
  ASYNC_TMA_STORE,
  ASYNC_BULK_LOAD,
  ASYNC_BULK_STORE,
  ASYNC_WGMMA,
  ASYNC_TC5_MMA,
  ASYNC_TC5_COMMIT
};

typedef struct Async {
  i32 kind, warp, pc, agent;
  u32 clock, mask, group;
  u64 sequence;
  Knowledge *knowledge;
  u32 clocks[32], fenced_clocks[32]; /* of the issuing lanes, at issue */
  u32 registers[128];                /* operands in registers, at issue: wgmma A */
  u64 source[32];
  u32 destination[32], bytes[32];
  u64 map; /* tensor map */
  i32 coordinates[8];
  u32 mbarrier, idesc, scale_d, d_address;
  u64 a_desc, b_desc;
  struct Async *next;
} Async;

enum { WAIT_NONE, WAIT_MBARRIER, WAIT_BARRIER, WAIT_GROUP, WAIT_ALLOC, WAIT_DONE };

typedef struct {
  struct Cta *cta;
  i32 index, wait, wait_id;
  u32 wait_value, wait_pc;
  u32 live, active, held, at_warp_barrier, napping; /* lane masks */
  u32 pc, lane_pc[32];
  u32 *registers, *predicates;
  u32 clock[32], fenced_clock[32];
  Knowledge *knowledge[32];
  u32 cp_agent[32], bulk_agent[32], cp_group[32], bulk_group[32], cp_clock[32], bulk_clock[32], cp_commit_clock[32][16];
  u32 wgmma_agent, wgmma_clock, wgmma_group, wgmma_issued;
  u32 tmem_agent[2], tmem_clock[2], tc5_loads; /* of tcgen05.ld and tcgen05.st */
  u32 *tc5_loading;                            /* per slot: 1 + pc of the tcgen05.ld that has not been waited for */
  u32 *wgmma_stamp;                            /* per slot: when another instruction last touched a wgmma register */
  u32 stamp, fence_stamp;
  u64 *counts; /* executions per instruction */
  u64 executed;
} Warp;

typedef struct {
  i32 count, size;
  u32 *epochs;
} ReaderSet;

typedef struct Cta {
  struct Machine *machine;
  i32 index, warps_left, agents, done;
  Warp *warps;
  u8 *shared;
  u32 *written, *written_pc, *read, *read_pc; /* per granule of shared memory */
  Mbarrier *mbarriers;                        /* one for each 8 bytes of shared memory */
  Barrier barriers[17];
  Async *pending, *pending_tail;
  u32 tma_agents[64], tma_clocks[64], tma_next;
  Knowledge *free_knowledge;
  ReaderSet *reader_sets;
  i32 reader_sets_used, reader_sets_size;
  i32 *free_reader_sets, free_reader_sets_count;
  u32 *tmem, *tmem_written, *tmem_written_pc, *tmem_read, *tmem_read_pc;
  u32 tmem_allocated[512], tmem_permit, tc5_agent, tc5_clock;
  i32 tmem_live;
} Cta;

typedef struct {
  i32 kind, pc_before, pc_now, cta, warp, lane, space, pad;
  u64 address, count;
  i64 state[3]; /* of what a warp waits for: phase, pending, bytes; or threads arrived, expected */
} Finding;

enum {
  FIND_RACE_RAW,
  FIND_RACE_WAR,
  FIND_RACE_WAW,
  FIND_FENCE,
  FIND_UNWRITTEN,
  FIND_BOUNDS,
  FIND_ALIGN,
  FIND_READONLY,
  FIND_MBARRIER,
  FIND_WGMMA,
  FIND_CONVERGENCE,
  FIND_BARRIER,
  FIND_TMEM,
  FIND_DEADLOCK,
  FIND_LIMIT,
  FIND_PENDING,
  FIND_DESCRIPTOR,
  FIND_TENSOR_MAP
};
#define MAX_FINDINGS 256

typedef struct Machine {
  /* program */
  Insn *code;
  i32 *lists;
  u32 *constants; /* 32 lanes a slot */
  i32 code_count, slots, predicate_slots, granule_shift, shared_bytes, shared_static, uses_tmem, pad;
  /* launch */
  i32 threads, ctas, grid[3], param_bytes;
  u8 *params;
  Allocation *allocations;
  i32 allocation_count, global_granule_shift;
  u64 seed, random;
  i32 policy, detect, stop_on_finding, late;
  u64 instruction_limit;
  /* result */
  Finding findings[MAX_FINDINGS];
  i32 finding_count, fatal;
  u64 executed, landed, bytes_read[4], bytes_written[4], macs;
  u64 *counts; /* [warps of a CTA][code_count], summed over CTAs */
  u64 progress, sequence;
  i32 starved_warp, starve_left;
  u8 stale[4096]; /* what the async proxy reads where a fence is missing */
} Machine;
